"""From a graph to how every value of it lies under a plan, in the types `AnalysedGraph` to `DeducedGraph`.

`analysed_graph` -> `annotate` -> `deduce`: per axis, a `forward_search` over `strategies`, priced by `reshard_cost`,
then cotangents back.
"""
