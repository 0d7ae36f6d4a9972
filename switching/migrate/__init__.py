"""One home layout becomes another: parameters and what optimizers keep of them.

`plan` decides, `buckets` bounds memory, `migrate` does it; `shared_memory` and `peer_memory` are used within a machine.
"""
