"""Factor classes: which dims of a whole graph are one dimension of parallelism.

`analyse` asks each op's rule, unifies what meets and gives the classes (`factors`); `row_order` proves which
rows a shard may order for itself.
"""
