"""Communication: the ops, and the one resolver that picks them."""
