"""From home to compute and back: parameters are gathered, gradients reduced, in buckets.

`plan` decides which slices travel, `message` lays them out, `run` sends them, `bridge` is what a step calls.
"""
