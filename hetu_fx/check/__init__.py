"""Tries a plan before it trains: cut small, in float64, as all of its ranks in this process, against one device."""
