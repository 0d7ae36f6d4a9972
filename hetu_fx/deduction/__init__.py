"""What each op does to sharding (`rules`), and what follows for a whole graph (`factors`)."""
