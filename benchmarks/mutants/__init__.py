"""Small mistakes in the source, for `python -m benchmarks.mutations`: does a test notice?"""
