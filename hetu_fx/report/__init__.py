"""What a run tells while it runs: the log, its sinks, its summary."""
