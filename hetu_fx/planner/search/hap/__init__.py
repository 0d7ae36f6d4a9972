"""HAP: one program for all devices, in shards of unequal size; `search` is where to start."""
