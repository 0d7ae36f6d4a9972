"""Schemes of tokens shared, of unequal devices and of blocks computed again: seconds and rows worked out by hand.

A row of s tokens takes s (A + s) FLOPs in each of 4 blocks, all of which a group shares, and keeps KEPT bytes of each
token in each, HANDED of which come from the block before. A device of unit speed does a FLOP in a second; a forward and
backward is three forwards.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plans
from hetu_fx.planner.search.hydraulis.adapter import variants
from hetu_fx.planner.search.hydraulis.schemes import SchemeShape, devices_by_kind, fitting_schemes
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts

BLOCKS, A, KEPT, HANDED = 4, 100.0, 60.0, 4.0
LENGTHS = (128, 512, 2048)


def program(length: int) -> ProgramCosts:
    flops = length * (A + length)
    block = PartCosts(
        flops=flops,
        split_flops=flops,
        activation_bytes=KEPT * length,
        sequence_activation_bytes=KEPT * length,
        traffic_bytes=0.0,
    )
    boundaries = (HANDED * length,) * (BLOCKS - 1)
    nothing = PartCosts()
    return ProgramCosts(8, nothing, (block,) * BLOCKS, nothing, boundaries, 8, sequence_units=8)


def problem(*speeds: float, tokens: float = 1e9, longest: int = 2048, **options: bool) -> Problem:
    """Return what is asked for devices of these speeds, each with memory for what so many tokens keep."""
    lengths = tuple((length, program(length)) for length in LENGTHS[:-1])
    profile = Profile(program(2048), tokens_per_row=2048, other_lengths=lengths, sequences={128: 20.0, longest: 1.0})
    memory = int(tokens * BLOCKS * KEPT)
    free = Link(1e30, 0.0)
    cluster = Cluster.on_paper(list(speeds), memory_bytes=memory, intra=free, inter=free)
    return Problem(profile, cluster, PlanOptions(memory_fraction=1.0, **options))


def by_name(asked: Problem) -> dict[str, tuple[float, float, int]]:
    """Return a and b of each scheme, and the tokens that it holds."""
    return {str(one): (one.times.a, one.times.b, one.max_length) for one in fitting_schemes(asked)}


def test_groups_that_share_tokens_take_their_part_of_the_time_and_hold_as_many_times_as_much() -> None:
    found = by_name(problem(1.0, 1.0, 1.0, 1.0, tokens=1024, longest=512))
    alone, two, four = (found[name] for name in ("<tp 1, pp 1>", "<tp 1, cp 2, pp 1>", "<tp 1, cp 4, pp 1>"))
    assert alone == (pytest.approx(3 * BLOCKS), pytest.approx(3 * BLOCKS * A), 1024)
    assert two == (pytest.approx(alone[0] / 2), pytest.approx(alone[1] / 2), 2048)
    assert four == (pytest.approx(alone[0] / 4), pytest.approx(alone[1] / 4), 4096)
    assert "<tp 2, cp 2, pp 1>" in found
    forbidden = by_name(problem(1.0, 1.0, context_parallel=False))
    assert not any("cp" in name for name in forbidden)


def test_what_has_no_room_for_the_longest_computes_its_blocks_again() -> None:
    """All that is kept of a token is then what each block but the first got, and while one is computed its own."""
    found = by_name(problem(1.0, tokens=1024, longest=2048))
    plain, again = found["<tp 1, pp 1>"], found["<tp 1, pp 1, recomputed>"]
    assert plain[2] == 1024
    assert again[0] == pytest.approx(plain[0] * 4 / 3)
    assert again[1] == pytest.approx(plain[1] * 4 / 3)
    assert again[2] > plain[2]
    assert by_name(problem(1.0, tokens=1024, longest=1024)).keys() == {"<tp 1, pp 1>"}
    assert by_name(problem(1.0, tokens=1024, longest=2048, recompute=False)).keys() == {"<tp 1, pp 1>"}


def test_unequal_devices_share_by_speed_and_the_last_to_hold_a_row_counts() -> None:
    """Speeds 3 and 1: of 8 parts the fast one has 6, which takes it as long as 2 take the other."""
    asked = problem(3.0, 1.0, tokens=1024, longest=512)
    fast, slow = (devices[0] for devices in devices_by_kind(asked.cluster))
    assert SchemeShape((1, 1), 1).stage((fast, slow), BLOCKS, asked.costs).ratios == (3, 1)
    found = by_name(asked)
    of_fast, of_slow = found["<tp 1, pp 1, of 1 + 0>"], found["<tp 1, pp 1, of 0 + 1>"]
    assert of_slow[0] == pytest.approx(3 * of_fast[0])
    heads, tokens = found["<tp 2, pp 1, of 1 + 1>"], found["<tp 1, cp 2, pp 1, of 1 + 1>"]
    assert heads[0] == tokens[0] == pytest.approx(of_slow[0] / 4)
    assert tokens[2] == 1280, "the fast one has memory for 1024 tokens, 3 / 4 of the row's 1365, in whole blocks of 128"
    assert heads[2] == 1024, "what is kept is no part of what heads split"


def test_a_pool_of_unequal_devices_has_plans_that_run_on_them() -> None:
    asked = problem(3.0, 3.0, 1.0, 1.0, tokens=1024, longest=2048)
    strategies = [variant.strategy for variant in variants(asked)]
    assert all(sum(s.by_kind[0] for s in one.pipelines) <= 2 for one in strategies)
    assert strategies[-1].max_length >= 2048
    plans = make_plans(asked, "hydraulis")
    for plan in plans:
        plan.check(num_blocks=BLOCKS, world_size=4)
    longest = plans[-1].pipelines[0]
    assert any(stage.shares_sequence or stage.recompute for stage in longest.stages)


def test_a_pool_recomputes_only_where_its_options_let_it() -> None:
    asked = problem(1.0, 1.0, tokens=700, longest=2048, context_parallel=False, tensor_parallel=False)
    assert any(plan.recomputes for plan in make_plans(asked, "hydraulis"))
    never = replace(asked, options=replace(asked.options, recompute=False))
    assert variants(never) == ()


def test_devices_that_differ_a_little_are_of_one_kind_which_is_as_slow_as_its_slowest() -> None:
    asked = problem(1.0, 0.95, 0.5, tokens=1024, longest=512)
    assert [[device.rank for device in devices] for devices in devices_by_kind(asked.cluster)] == [[0, 1], [2]]
    assert by_name(asked)["<tp 1, pp 1, of 1 + 0>"][0] == pytest.approx(3 * BLOCKS / 0.95)


def test_of_too_many_unlike_devices_no_pool_is_made() -> None:
    asked = problem(*[1.0] * 40, *[0.5] * 40)
    with pytest.raises(PlanError, match=r"too many ways to choose among 40 \+ 40 devices of 2 kinds \(over 600\)"):
        make_plans(asked, "hydraulis")
