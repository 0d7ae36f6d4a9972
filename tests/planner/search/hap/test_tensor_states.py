"""Changes of layout, against what the resolver makes of the same change, forward and backward."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Split
from hetu_fx.comm_ops.resolve.resolve import resolve
from hetu_fx.planner.search.hap.tensor_states import COPY, PARTIAL, SHARED, Layout, changes, split

SIZE, DEVICES = 12, (0, 1, 2)
LAYOUTS = (COPY, SHARED, split(0), split(1), PARTIAL)
VALUES = {COPY: Duplicate, SHARED: Duplicate, PARTIAL: Partial} | {split(i): partial(Split.even, i) for i in (0, 1)}
GRADIENTS = VALUES | {SHARED: Partial, PARTIAL: Duplicate}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@pytest.mark.parametrize(("source", "target"), [pair for pair in product(LAYOUTS, LAYOUTS) if pair[1] != PARTIAL])
def test_a_change_is_what_the_resolver_makes_of_it_forward_and_of_its_gradient_backward(
    source: Layout, target: Layout
) -> None:
    found = [both for _, both in changes(source, target)]
    assert len(found) == (source != target)
    kinds = [kind and kind.replace("-", "_") for kind in (found[0] if found else (None, None))]
    forward = resolved(VALUES[source], VALUES[target])
    backward = resolved(GRADIENTS[target], GRADIENTS[source])
    assert kinds == [forward, backward]


def resolved(source: object, target: object) -> str | None:
    """Return the collective that the resolver takes, an exchange for parts of other dims, or None for what is local."""
    ends = [Annotation.on(DEVICES, make(len(DEVICES))) for make in (source, target)]  # type: ignore[operator]
    steps = resolve(*ends, (SIZE, SIZE)).steps
    names = [step.op for step in steps]
    assert len(names) <= 1
    if names and names[0] in COLLECTIVES:
        return names[0]
    are_split = all(isinstance(axis, Split) for end in ends for axis in end.shardings[0].axes)
    return "all_to_all" if names and are_split else None
