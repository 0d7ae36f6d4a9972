"""Plans: space, cost and search."""
