"""Types and words that every layer shares; imports nothing of the other layers."""
