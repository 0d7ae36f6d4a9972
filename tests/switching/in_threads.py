"""Two ranks in threads, for what a rank alone does not do: parameters have homes, and come by a bridge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.graph.bind import Batch
from hetu_fx.plans.plan import Plan
from hetu_fx.prepare import check_plans_and_choose_homes, make_runtime
from hetu_fx.program.captures import Programs
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.settings import Settings

REPLICAS = Plan.data_parallel((0, 1))


def as_two_ranks(test: Callable[[GroupTable], None]) -> Callable[[], None]:
    """Have both of two ranks run a test."""

    def run() -> None:
        run_in_threads(2, test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def runtime_of(
    table: GroupTable,
    model: nn.Module,
    batch: Batch,
    loss_fn: Callable[..., Any] | None = None,
    *,
    plan: Plan = REPLICAS,
    shared: bool = True,
) -> Runtime:
    """Make a model parallel, as two replicas without a plan; `shared`: all ranks are given the same rows."""
    execution = GraphExecution(Programs(model, loss_fn), batch, None)
    layouts = check_plans_and_choose_homes((plan,), model, execution, None, table)
    return make_runtime(model, None, table, execution, (plan,), layouts, Settings(shared, outputs="auto", seed=0))
