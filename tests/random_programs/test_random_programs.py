"""Some pairs of a random program and a random plan; what is planted is found and made small.

`python -m tests.random_programs --seconds 600` tries as many as there is time for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest

from hetu_fx.deduction.rules.build import keep_dims
from hetu_fx.deduction.rules.registry import register_rule, unregister_rule
from hetu_fx.plans.plan import Plan
from tests.ops.trial import Kind
from tests.random_programs import plans
from tests.random_programs.program import Drawn, Program, draw
from tests.random_programs.run import of_program, shrunk, tried

TENSOR = replace(Plan.tensor_parallel((0, 1, 2)), split=(("m0.weight", 0),))


@pytest.mark.parametrize("seed", range(3))
def test_random_programs_train_as_on_one_device_or_are_refused(seed: int) -> None:
    found = next(pairs for number in range(9) if (pairs := list(of_program(seed, number))))
    assert {pair.kind for pair in found} <= {Kind.RIGHT, Kind.REFUSED}, "\n".join(pair.text for pair in found)


def test_the_same_seed_draws_the_same_program_and_plan() -> None:
    one, other = (draw(Random("7"), 0.3) for _ in range(2))
    assert one == other
    assert plans.draw(Random(1), 3) == plans.draw(Random(1), 3)


def test_programs_and_plans_with_less_in_them_can_still_be_tried() -> None:
    program = next(found for seed in range(99) if (found := draw(Random(seed), 0.0)).blocks and found.after)
    assert any(smaller.can_be for smaller in program.smaller())
    plan = Plan.data_parallel((0, 1, 2), (3, 1, 1))
    assert {len(smaller.pipelines) for smaller in plans.smaller(plan)} == {2, 3}


@contextmanager
def wrong_rule() -> Iterator[None]:
    """Believe that each part of what is turned round comes from the same part."""
    register_rule("aten.flip.default", lambda call: keep_dims(call))
    try:
        yield
    finally:
        unregister_rule("aten.flip.default")


def test_a_wrong_rule_is_found_and_the_case_made_small() -> None:
    steps = next(steps for seed in range(99) if "flip" in (program_of(steps := wide_and_turned(seed))).source)
    program = Program((6,), (("unary", 1), *steps, ("scaled", 3)), (), (), 0, "squared error", (7,))
    with wrong_rule():
        pair = tried("planted", program, TENSOR)
        assert pair is not None
        assert pair.kind is Kind.WRONG
        small = shrunk(pair)
    assert [name for name, _ in small.program.before] == ["linear", "moved"]
    assert len(small.plan.devices) == 2
    assert "flip" in small.text
    assert '"pipelines"' in small.text


def wide_and_turned(seed: int) -> tuple[Drawn, ...]:
    wide = next(wide for wide in range(99) if "nn.Linear(6, 8" in program_of((("linear", wide),)).source)
    return ("linear", wide), ("moved", seed)


def program_of(steps: tuple[Drawn, ...]) -> Program:
    return Program((6,), steps, (), (), 0, "mean", (7,))
