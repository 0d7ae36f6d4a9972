"""Count in a captured graph: FLOPs, bytes, what is alive when."""
