"""The runtime: it runs each batch on the current variant, and switches between variants.

`home` (what optimizers see) -> `bridge` (home to compute and back), `migrate` (one home to another) -> `step` (one step
of one variant) -> `sequences`, `eager` -> `adapt` (health, new plans, new homes). `runtime` owns all that changes.
"""
