"""Models of published libraries as they are, on trial as model families are: `python -m benchmarks.zoo`."""
