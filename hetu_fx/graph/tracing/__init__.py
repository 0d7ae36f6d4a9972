"""What a forward is under while it is traced, so that more of it can be."""
