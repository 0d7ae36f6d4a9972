"""Modules that no trace goes into: each call of one is an op of the graph, which calls the module as it is."""
