"""The parts of `python -m benchmarks.mixed_length`: contestants, plans, rounds, ablation."""
