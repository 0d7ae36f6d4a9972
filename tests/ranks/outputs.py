"""Runs one step as all ranks of a plan, in this process, and gives what each of them gets."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hetu_fx.base.device_types import HOST
from hetu_fx.comm_ops.wire.consensus import raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.graph.row_dims import AskedRowDims
from hetu_fx.lockstep import move_model
from hetu_fx.plans.plan import Plan
from hetu_fx.prepare import check_plans_and_choose_homes, make_runtime
from hetu_fx.program.captures import Programs
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.settings import Settings

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Ranks:
    """How ranks are called: what each brings (None: all the whole batch), what comes back, which dims count rows."""

    plan: Plan
    shared: bool = False
    outputs: str = "all"
    row_dims: Mapping[str, int | None] = field(default_factory=dict)

    def call(self, model: nn.Module, batches: Sequence[Batch], calls: int = 1) -> list[Any]:
        """Return the output of each rank, which brings its own of `batches`; the last of several calls."""
        programs = Programs(copy.deepcopy(model), None, row_dims=AskedRowDims(self.row_dims), outputs=self.outputs)
        execution = GraphExecution(programs, batches[0], None)

        def rank(table: GroupTable) -> Any:
            own = move_model(copy.deepcopy(model), HOST)
            table.connect(HOST)
            table.know_types([HOST.type] * len(batches))
            with using(table):
                homes = raise_on_all_ranks(
                    table, lambda: check_plans_and_choose_homes((self.plan,), own, execution, None, table)
                )
            settings = Settings(shared=self.shared, outputs=self.outputs, seed=0)
            runtime = make_runtime(own, None, table, execution, (self.plan,), homes, settings)
            made = [runtime.run((), batches[table.rank]) for _ in range(calls)]
            return made[-1]

        return run_in_threads(len(batches), rank)
