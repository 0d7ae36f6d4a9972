"""Golden numbers of a batch on Hydraulis' published pool, by the authors' planner; lengths to draw."""

from __future__ import annotations

from hypothesis import strategies as st

from benchmarks.cases.published_hydraulis import SCHEMES
from hetu_fx.planner.dispatch.scheme_costs import SequenceBatch

BATCH = SequenceBatch((12000,) * 6 + (6000,) * 10 + (3000,) * 20)
DISPATCH_MS = (5463, 5019, 4134, 8566, 5424, 12018, 4958)
PACKED_MS = (5754, 5729, 4474, 10164, 6776, 13552, 5339)

schemes = st.sampled_from(sorted(SCHEMES.values(), key=str))


def lengths_up_to(most: int, *, count: int) -> st.SearchStrategy[list[int]]:
    """Draw lengths of one to `count` sequences, often equal ones."""
    some = st.one_of(st.integers(1, most), st.sampled_from([most, most // 2, most // 3, 128]))
    return st.lists(some, min_size=1, max_size=count)
