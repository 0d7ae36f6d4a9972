"""From home to compute and back: parameters are gathered, gradients reduced, in buckets.

`plan` decides which slices travel, `message` lays them out, `bridge` sends them and is what a step calls.
"""
