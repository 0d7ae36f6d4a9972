"""Malleus: plans around stragglers; `search` is where to start."""
