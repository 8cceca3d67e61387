"""From a plan to running processes and the folder they leave."""
