"""Variants of a model that could not be captured: data parallel over the module as it is, with uneven shares."""
