"""Ranks that are threads of one process: `run` runs them, `turns` says whose turn it is.

`thread_transport` carries their messages. For tests, `hetu-fx verify --ranks` and bug reports: they run what processes
run, numbers are the same, times mean nothing.
"""
