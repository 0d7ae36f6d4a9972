"""Clients of the public API: accelerate, checkpoints, export."""
