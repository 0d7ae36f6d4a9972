"""Annotate leaves, search strategies forward through the graph, deduce every annotation.

`annotate` -> `forward_search` over `strategies`, priced by `reshard_cost` -> `cotangents` -> `deduce`,
which gives a `DeducedGraph`.
"""
