"""Ranks that are threads of one process: `run` runs them, `turns` says whose turn it is, `transport` carries messages.

For tests, `hetu-fx verify --ranks` and bug reports: they run what processes run, numbers are the same, times mean
nothing.
"""
