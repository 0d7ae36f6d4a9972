"""What HAP plans for, on devices whose memory is not a CPU's."""

from __future__ import annotations

from dataclasses import replace

from hetu_fx.cluster.devices import FLOPS_PER_BYTE
from tests.planner.search.hap.small import feed_forward


def test_only_what_moves_bytes_costs_more_where_memory_is_slower() -> None:
    problem = feed_forward()
    first, *others = problem.ops
    moving = replace(problem, ops=(replace(first, moves=True), *others))
    found = moving.at(2 * FLOPS_PER_BYTE)
    assert found.ops[0].flops == 2 * first.flops
    assert found.backward_flops(found.ops[0]) == tuple(2 * flops for flops in problem.backward_flops(first))
    assert found.ops[1:] == problem.ops[1:]
    assert moving.at(FLOPS_PER_BYTE) is moving
