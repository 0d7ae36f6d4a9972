"""Hydraulis: plans for sequences of unequal length; `pool` makes strategies, `choose` picks one per batch."""
