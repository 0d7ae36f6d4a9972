"""One home layout becomes another: parameters and what optimizers keep of them.

`plan` decides, `buckets` bounds memory, `migrate` does it, within a machine by memory that ranks share.
"""
