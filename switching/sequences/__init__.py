"""Batches of mixed lengths: read, planned ahead off the critical path, and packed."""
