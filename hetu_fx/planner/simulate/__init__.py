"""A plan executed on paper: events in time, as a timeline.

`simulate` makes jobs of a schedule, `events` runs them on lanes and links, `simulation` sums them up.
"""
