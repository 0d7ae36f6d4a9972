"""Regions of programs: what is refused, and what the plan file has of them."""

from __future__ import annotations

from typing import Any

import pytest

from hetu_fx.errors import PlanError
from hetu_fx.plans.op_regions import LeafDim, OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage

REGIONS = (OpRegion("mlp.*:linear", "mlp.up.weight:0.1", (4, 2)), OpRegion("*", "whole"))


def planned(*regions: OpRegion, stages: int = 1, **plan: Any) -> Plan:
    parts = [Stage((2 * i, 2 * i + 1), (2, 1), program=regions if i == 0 else ()) for i in range(stages)]
    return Plan((Pipeline(tuple(parts)),), **plan)


def test_a_program_is_written_and_read_as_it_is() -> None:
    plan = planned(*REGIONS)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.has_program
    assert plan.pipelines[0].stages[0].program[0].ratios == (2, 1)
    assert plan.summary() == "1 row: [0,1 2:1 program of 2]"


def test_a_dim_of_a_leaf_is_read_with_the_factor_that_it_names() -> None:
    assert [region.leaf_dim for region in REGIONS] == [LeafDim("mlp.up.weight", 0, 1), None]
    assert str(LeafDim("mlp.up.weight", 0, 1)) == "mlp.up.weight:0.1"
    assert [region.is_cut for region in (*REGIONS, OpRegion("*", "rows"), OpRegion("*", "summands"))] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("region", "said"),
    [
        (("", "rows"), "a region has no ops\nhint: give a pattern"),
        (("*", "columns"), r"region '\*' has split 'columns'\nhint: give 'rows', 'whole'"),
        (("*", "whole", (1, 2)), r"has ratios \[1, 2\], but its ops are not cut"),
        (("*", "rows", (0, 0)), r"has ratios \[0, 0\]\nhint: give whole numbers from 0, not all of them 0"),
        (("*", "whole", (), True), "has factors, but its ops are not cut"),
    ],
)
def test_a_region_that_contradicts_itself_is_refused(region: tuple[Any, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        OpRegion(*region)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regions": (OpRegion("*", "rows", (1, 1, 1)),)}, r"program\[0\]: region '\*' has 3 ratios .* for 2 devices"),
        ({"stages": 2}, "but the plan has several pipelines or stages\nhint: give one pipeline of one stage"),
        ({"sequence_parallel": True}, "but the plan has sequence_parallel"),
        ({"split": (("up", 0),)}, "but the plan has split"),
    ],
)
def test_a_program_beside_what_it_would_have_to_agree_with_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        planned(*given.pop("regions", REGIONS), **given)


def test_a_plan_shows_its_program_region_by_region() -> None:
    regions = (
        OpRegion("up:*", "up.weight:0", (3, 1)),
        OpRegion("down:*", "rows", factors=True),
        OpRegion("*", "whole"),
    )
    shown = str(Plan((Pipeline((Stage((0, 1), (2, 1), program=regions),)),)))
    lines = [line.split() for line in shown.splitlines()]
    told = [["up:*", "up.weight:0", "3:1"], ["down:*", "rows", "2:1", "from", "factors"], ["*", "whole"]]
    assert [line for line in lines if line in told] == told
