"""Searches for plans; `table` lists them, one folder for each system that is carried over."""
