"""Passes from the captured graph to one graph per device."""
