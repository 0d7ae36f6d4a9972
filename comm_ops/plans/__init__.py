"""Which slice of a tensor goes from which rank to which, and by which algorithm: pure values, no process group.

`slices` cuts tensors where layouts differ; `split_plan`, `bsr_plan` and `ring_plan` say who sends what to whom; `cost`
and `choose_algorithm` say how long each way takes.
"""
