"""Which sequence goes to which pipeline, and into which packed row (Hydraulis).

`candidates` and `makespan` search, `local_search` and `refine` improve, `lower_bounds` say how far from best.
"""
