"""One rank's graph out of the deduced one: local ops, local sizes, communication nodes, stages.

`specialize` asks `localize` and the forms of rules for each op, `reshard` for each edge; a `DeviceGraph` comes out.
"""
