"""One home layout becomes another: parameters and what optimizers keep of them.

`plan` decides, `buckets` bounds memory, `migrate` does it; `node_memory` is used within a machine.
"""
