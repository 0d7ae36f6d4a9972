"""What ranks of one machine do that can read each other's memory."""
