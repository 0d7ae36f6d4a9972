"""Messages and collectives of devices of unlike types. `python -m benchmarks.transport` runs it."""
