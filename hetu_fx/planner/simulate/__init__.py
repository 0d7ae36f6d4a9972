"""A plan executed on paper: events in time, as a timeline and as pictures.

`pipeline` makes jobs of a schedule, `events` runs them on lanes and links, `timeline` shows them.
"""
