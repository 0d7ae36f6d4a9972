"""Searches for plans, a folder for each system that is carried over; what they share stands beside the folders.

`problem` is the question that every search answers; the table of them stands above, in `hetu_fx.planner.searches`.
"""
