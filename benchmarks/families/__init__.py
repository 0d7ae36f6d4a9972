"""The model families of `python -m benchmarks.coverage`: configurations, nets, batches, and how each is tried."""
