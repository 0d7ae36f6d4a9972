"""What a run tells while it runs.

`run_log` makes entries of what happens, `rates` what goes with steps, `sinks` take them. `summary`, `run`
and `page` read the file that one of those writes.
"""
