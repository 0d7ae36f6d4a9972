"""Wrong moves, planted in what is decided, and whether training by all ranks in one process finds them."""
