"""What becomes of a device graph before it runs: algorithms of its communication, recompute, compilation."""
