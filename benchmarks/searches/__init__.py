"""Each search alone: its seconds, and how good its answers are, as `python -m benchmarks.searches.hap` and so on."""
