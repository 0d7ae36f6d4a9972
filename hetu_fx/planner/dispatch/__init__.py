"""Which sequence goes to which pipeline, and into which packed row (Hydraulis).

`dispatch` picks pipelines by `makespan`, and says how far that is from the best; `pack` and `rows` fill rows, and
`policies`, which users choose from, find the variant that ends first.
"""
