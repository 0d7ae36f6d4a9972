"""Training under plans of 8 to 64 ranks equals training on one device: all ranks in one process, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.end_to_end.cells import DTYPES, Step, check_equal, make_batch
from tests.model_zoo import SAMPLES

ADAMW = partial(torch.optim.AdamW, lr=1e-2)

pytestmark = pytest.mark.usefixtures("losses_in_double")


def stages(*degrees: int, first: int = 0, **options: Any) -> tuple[Stage, ...]:
    """Give stages of groups of these sizes, on ranks from `first` on."""
    starts = [first + sum(degrees[:place]) for place in range(len(degrees))]
    pairs = zip(starts, degrees, strict=True)
    return tuple(Stage(tuple(range(start, start + degree)), **options) for start, degree in pairs)


def pipelines(*shapes: tuple[int, ...], shares: tuple[int, ...] = (), micro_batches: int = 2) -> tuple[Pipeline, ...]:
    """Give pipelines of such groups, one after another on the ranks."""
    starts = [sum(map(sum, shapes[:place])) for place in range(len(shapes))]
    each = zip(starts, shapes, shares or (1,) * len(shapes), strict=True)
    return tuple(
        Pipeline(stages(*shape, first=start), share=share, micro_batches=micro_batches) for start, shape, share in each
    )


@dataclass(frozen=True)
class Case:
    """Plans that run one after another, of a model with so many blocks and heads."""

    plans: tuple[Plan, ...]
    rows: int
    model: str = "llama"
    changes: Mapping[str, Any] = field(default_factory=dict)
    brought: tuple[int, ...] | None = None
    cluster: Cluster | None = None


def heads(blocks: int, count: int) -> dict[str, int]:
    """Give the sizes of a decoder of so many blocks and heads, which tensor parallel groups split."""
    sizes = {"num_attention_heads": count, "num_key_value_heads": count, "hidden_size": 4 * count}
    return {**sizes, "intermediate_size": 48, "num_hidden_layers": blocks}


EVEN = Plan(pipelines((4, 4), (4, 4)))
UNLIKE = Plan(pipelines((8, 4), (2, 1), (1,), shares=(5, 2, 1)))
EIGHT_SHARES = (3, 1, 2, 2, 1, 1, 3, 1)
EXPERTS = Plan(
    (Pipeline((Stage((0, 1, 2, 3), (2, 1, 1, 1)),)), Pipeline((Stage((4, 5, 6, 7)),))), split=(("*.experts.*", 0),)
)
GRIDS = Plan(
    (
        Pipeline(
            (Stage(tuple(range(6)), (2, 1), context=3, context_ratios=(2, 1, 1)), *stages(2, first=6)),
            share=3,
            micro_batches=3,
        ),
        Pipeline((Stage((8, 9), context=2), *stages(2, first=10)), share=2, micro_batches=2),
    )
)
DEPTHS = Plan(pipelines((4, 4, 2, 2), (2, 2, 1, 1), (4, 2), shares=(3, 2, 1)))
THREE = Plan(pipelines((8, 8, 4, 4), (4, 4, 4, 4), (4, 2, 1, 1), shares=(3, 2, 1)))
FOUR = Plan(pipelines(*((4, 4, 4, 4),) * 4))
NODES = Cluster.on_paper([1e9] * 8, nodes=("a",) * 4 + ("b",) * 4, intra=Link(1e10), inter=Link(1e6))
ACROSS = Plan((Pipeline((Stage((0, 1, 4, 5)), Stage((2, 3, 6, 7))), micro_batches=2),))
BESIDE = Plan(pipelines((4,), (4,)))
SPARSE_ROWS = (5, 0, 1, 1, 3, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1)

CASES = {
    "8 replicas of unequal shares": Case((Plan.data_parallel(range(8), (5, 1, 2, 3, 1, 1, 2, 1)),), 16),
    "8 ranks, states on every replica": Case((replace(Plan(pipelines((2,), (2,), (2,), (2,))), zero=0),), 8),
    "8 ranks that split a group unevenly": Case(
        (Plan((Pipeline((Stage(tuple(range(8)), EIGHT_SHARES),)),)),), 2, changes=heads(2, 14)
    ),
    "8 ranks on two nodes, groups across them": Case((ACROSS,), 4, changes=heads(2, 8), cluster=NODES),
    "8 ranks on two nodes, a replica on each": Case((BESIDE,), 4, changes=heads(2, 8), cluster=NODES),
    "8 ranks that share experts": Case((EXPERTS,), 4, "mixtral", heads(2, 8)),
    "12 ranks, context parallel grids before tensor parallel groups": Case((GRIDS,), 9),
    "16 ranks, unlike pipelines that become even and back": Case((UNLIKE, EVEN, UNLIKE), 9, changes=heads(3, 8)),
    "16 ranks, each with rows of its own": Case((EVEN,), 17, changes=heads(2, 8), brought=SPARSE_ROWS),
    "24 ranks, pipelines of unlike depth": Case((DEPTHS,), 12, changes=heads(4, 8)),
    "48 ranks, three pipelines of unlike groups": Case((THREE,), 12, changes=heads(4, 8)),
    "64 ranks, four pipelines of four stages": Case((FOUR,), 8, changes=heads(4, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_training_by_many_ranks_equals_one_device(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(17)
    model = SAMPLES[case.model].model(**case.changes).to(DTYPES.get(case.model, torch.float64)).train()
    given = [make_batch(case.model, Step("", case.rows, 11), number) for number in range(max(2, len(case.plans)))]
    order = tuple(number % len(case.plans) for number in range(len(given)))
    how = Lockstep(ADAMW, rows=case.brought, plan_of_step=order, cluster=case.cluster)
    plans = tuple(replace(plan, name=f"plan {number}") for number, plan in enumerate(case.plans))
    check_equal(name, train_alone(model, given, how), how.train(model, given, plans), case.model)
