"""Which slice of a tensor goes from which rank to which, and by which algorithm: pure values, no process group.

`slices` cuts tensors where layouts differ; `routes` says which collective takes a slice to whom, `bsr_plan` what
everyone sends; `cost` and `choose_algorithm` say how long each way takes.
"""
