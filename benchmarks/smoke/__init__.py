"""The smallest case of every benchmark, for `python -m benchmarks.smoke`."""
