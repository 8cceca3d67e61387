"""Decides how a recipe will run and what it needs, before any device is touched."""
