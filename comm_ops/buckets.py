"""How parameters and gradients travel between home and where they are computed with: in buckets."""

BUCKET_BYTES = 25 << 20
"""Parameters that travel together: large enough for the wire, small enough to start early."""

BUCKETS_AT_ONCE = 3
"""So many are under way when parameters are gathered: enough to keep the wire busy while the next is packed."""
