"""What runs on every rank of a benchmark, in a process of its own."""
