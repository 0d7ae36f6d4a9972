"""Plans in low dtypes are priced by what the cluster says of kinds, and made where they are allowed and faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.precisions import Precision, merge_precisions, precision_table
from hetu_fx.errors import ClusterError, PlanError
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.simulate.simulate import simulated_seconds
from hetu_fx.planner.values.options import Choice, PlanOptions
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import FAST_LINK, transformer

BIG = transformer(rows=16, length=512, width=512)
KINDS = ("quick", "quick", "plain", "plain")
PRECISIONS = (
    Precision("quick", "bfloat16", 4.0),
    Precision("quick", "float16", 3.0),
    Precision("plain", "bfloat16", 0.5),
    Precision("plain", "float16", 1.5),
)
BF16 = PlanOptions(bfloat16=True)


def cluster(*precisions: Precision, kinds: tuple[str, ...] = KINDS) -> Cluster:
    made = Cluster.on_paper([100e9] * len(kinds), kinds=kinds, intra=FAST_LINK)
    return replace(made, precisions=precisions or PRECISIONS)


def dtypes(plan: Plan) -> dict[int, str | None]:
    return {rank: stage.dtype for *_, stage in plan.stages for rank in stage.devices}


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.seconds


def test_products_take_less_in_a_dtype_and_what_moves_memory_takes_the_same() -> None:
    def taken(dtype: str | None) -> float:
        return predict(Plan((Pipeline((Stage((0,), blocks=4, dtype=dtype),)),)), BIG, cluster()).seconds

    faster = tuple(replace(d, flops_per_second=d.flops_per_second * 4) for d in cluster().devices)
    whole = replace(cluster(), devices=faster)
    as_quick = predict(Plan((Pipeline((Stage((0,), blocks=4),)),)), BIG, whole).seconds
    products = 3 * (4 * BIG.blocks[0].flops + BIG.after.flops) * BIG.rows / 100e9
    assert taken(None) - taken("bfloat16") == pytest.approx(products * 3 / 4)
    assert taken("bfloat16") > as_quick, "whose memory is faster too"


@pytest.mark.parametrize("search", ["auto", "heteroauto", "malleus"])
def test_each_kind_computes_in_what_is_fastest_there_and_work_follows(search: str) -> None:
    plain, low = (make_plan(BIG, cluster(), options=options, search=search) for options in (PlanOptions(), BF16))
    assert set(dtypes(plain).values()) == {None}
    assert dtypes(low) == {0: "bfloat16", 1: "bfloat16", 2: None, 3: None}
    assert seconds(low) < 0.75 * seconds(plain)
    assert seconds(low) == pytest.approx(simulated_seconds(low, BIG, cluster()), rel=0.05)


def test_what_is_not_allowed_or_not_known_of_a_kind_is_not_planned() -> None:
    unknown = cluster(Precision("other", "bfloat16", 4.0))
    assert set(dtypes(make_plan(BIG, unknown, options=BF16)).values()) == {None}
    assert set(dtypes(make_plan(BIG, cluster())).values()) == {None}
    assert PlanOptions().chosen(Choice.of(allow="bfloat16")).dtypes == ("bfloat16",)
    refused = PlanOptions().refused(Plan((Pipeline((Stage((0,), dtype="bfloat16"),)),)))
    assert refused == ("bfloat16",)


def test_unlike_kinds_in_one_stage_compute_in_what_all_gain_by() -> None:
    mixed = cluster()
    assert mixed.fastest_dtype((0, 1), ("bfloat16", "float16")) == "bfloat16"
    assert mixed.fastest_dtype((0, 2), ("bfloat16", "float16")) == "float16"
    assert mixed.fastest_dtype((0, 2), ("bfloat16",)) is None
    assert mixed.fastest_dtype((0, 2), ()) is None


def test_a_cluster_file_says_what_its_kinds_compute_in() -> None:
    written = cluster().to_json()
    assert written["precisions"][0] == {"kind": "quick", "dtype": "bfloat16", "speedup": 4.0}
    assert Cluster.from_json(written) == cluster()


@pytest.mark.parametrize(
    ("precisions", "told"),
    [
        ([{"kind": "quick", "dtype": "bf16", "speedup": 2.0}], "dtype 'bf16'"),
        ([{"kind": "quick", "dtype": "bfloat16", "speedup": 0}], "speedup 0"),
        ([{"kind": "quick", "dtype": "bfloat16", "speedup": 2.0}] * 2, "stand twice"),
    ],
)
def test_precisions_that_cannot_be_are_refused(precisions: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(ClusterError, match=told):
        Cluster.from_json(cluster().to_json() | {"precisions": precisions})


def test_what_ranks_have_found_of_a_kind_is_their_median() -> None:
    found = merge_precisions(
        ("a", "a", "a", "b"), [{"bfloat16": 2.0}, {"bfloat16": 9.0}, {"bfloat16": 3.0}, {"float16": 1.0}]
    )
    assert found == (Precision("a", "bfloat16", 3.0), Precision("b", "float16", 1.0))
    assert precision_table(found) == [["a", "bfloat16", "3 x float32"], ["b", "float16", "1 x float32"]]


def test_a_dtype_that_a_stage_cannot_have_is_refused() -> None:
    for dtype in ("int8", "float16"):
        with pytest.raises(PlanError, match=f"has dtype '{dtype}'\nhint: give 'bfloat16', or leave it out"):
            Stage((0,), dtype=dtype)
