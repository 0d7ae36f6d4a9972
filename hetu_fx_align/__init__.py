"""Aligns two ways of running a model's ops: distinct ops, each in both ways and in an up-cast reference, and the whole
model side by side."""
