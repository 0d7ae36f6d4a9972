"""Messages between devices of unlike types. `python -m benchmarks.transport` runs it."""
