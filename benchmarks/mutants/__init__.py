"""Small mistakes in the source, for `python -m benchmarks.mutants`: does a test notice?"""
