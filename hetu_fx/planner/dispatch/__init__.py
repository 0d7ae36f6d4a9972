"""Which sequence goes to which pipeline, and into which packed row (Hydraulis).

`dispatch` picks pipelines by `makespan`, `local_search` improves that, `lower_bounds` say how far it is from the best;
`pack` fills rows, `batching` finds the variant that ends first, and `policies` are what users choose from.
"""
