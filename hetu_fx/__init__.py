"""Automatic parallelization for PyTorch on unequal devices."""
