"""The frameworks' own parsers and validators, run on rendered jobs: a module for each framework."""
