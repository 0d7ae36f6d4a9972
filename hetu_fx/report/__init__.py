"""What a run tells while it runs.

`run_log` makes entries of what happens, `sinks` take them, `summary` reads the file that one of those writes.
"""
