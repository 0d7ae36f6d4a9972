"""One rank's graph out of the deduced one: local ops, local sizes, communication nodes, stages.

`specialize` asks `local_sizes` and the forms of rules for each op, `reshard` for each edge; a `DeviceGraph` comes out.
"""
