"""Factor classes: which dims of a whole graph are one dimension of parallelism.

`steps` asks each op's rule, `factors` unifies what meets, `analyse` gives the classes; `rows` finds the batch's.
"""
