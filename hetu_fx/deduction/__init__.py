"""What each op does to sharding, and what follows for a whole graph."""
