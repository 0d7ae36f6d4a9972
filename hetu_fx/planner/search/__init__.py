"""Searches: each in a file of its own, all in the one table of `table`."""
