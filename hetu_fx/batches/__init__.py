"""Samplers and packing for batches of unequal lengths: before the model, no graph known."""
