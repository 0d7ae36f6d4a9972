"""The one owner of live state: groups, home parameters, captured programs, variants, and what runs now.

A step: facts of all ranks are agreed on, a variant is chosen, rows move to its pipelines, parameters are gathered,
the stage runs, and one loss comes out on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from hetu_fx.comm_ops.groups import GroupTable, using
from hetu_fx.errors import BatchError, HetuFxError, StateError
from hetu_fx.graph.graph import Graph
from hetu_fx.plan import Plan
from hetu_fx.switching.agreement import LocalFacts, StepFacts, agree
from hetu_fx.switching.batches import ReadBatch, read_batch
from hetu_fx.switching.buffers import Buffers
from hetu_fx.switching.policy import BatchFacts, Health, VariantFacts, choose
from hetu_fx.switching.programs import Programs
from hetu_fx.switching.rows import RowPlan, plan_rows
from hetu_fx.switching.run_step import StepInputs, run_step
from hetu_fx.switching.timer import ComputeTimer
from hetu_fx.switching.variant import Variant


@dataclass(frozen=True)
class Settings:
    """How the user wants the model to run.

    Attributes:
        shared: every rank passes the same whole batch (`data="global"`); otherwise each its own rows.
        outputs: "auto" (other outputs than the loss in evaluation only), "all" or "loss".
        backend: what compiles device graphs; None runs them eagerly.
        seed: of all random numbers that the model draws.
    """

    shared: bool
    outputs: str
    backend: Any
    seed: int | None


@dataclass
class StepReport:
    """What the last step did: for `model.hetu.stats`."""

    variant: str = ""
    rows: tuple[int, ...] = ()
    timer: ComputeTimer = field(default_factory=ComputeTimer)


class LossAndOutput(NamedTuple):
    """What a model with a loss_fn returns: the loss, and the model's own output (None where it is not asked for)."""

    loss: torch.Tensor | None
    output: Any


Observer = Callable[[StepFacts], None]


class Runtime:
    """Runs batches on the current variant, and changes it between steps."""

    def __init__(
        self,
        model: nn.Module,
        table: GroupTable,
        programs: Programs,
        homes: Mapping[str, nn.Parameter],
        settings: Settings,
    ) -> None:
        self.model, self.table, self.programs, self.homes = model, table, programs, homes
        self.settings = settings
        self.buffers = Buffers(model, table)
        self.variants: dict[str, Variant] = {}
        self.current = ""
        self.syncs_gradients = True
        self.step = 0
        self.report = StepReport()
        self.pinned: str | None = None
        self.switches = 0
        self.policy: Policy = choose_variant
        self.health = Health()
        self.observers: list[Observer] = []

    def add_variant(self, plan: Plan, name: str, planned_rates: Mapping[int, float] | None = None) -> Variant:
        """Add a variant; its device graphs are made when a batch first needs them."""
        if name in self.variants:
            raise StateError(f"there is a variant {name!r} already; choose another name")
        plan.check(num_blocks=self.programs.num_blocks, world_size=self.table.size)
        self.variants[name] = Variant(
            name, plan, self.table, self.homes, self.settings.backend, dict(planned_rates or {})
        )
        self.current = self.current or name
        return self.variants[name]

    def pin(self, name: str | None) -> None:
        """Run one variant from the next step on (None: let the policy choose again)."""
        if name is not None:
            self._known(name)
        self.pinned = name

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one batch; collective."""
        with using(self.table):
            batch, facts = self._agree(args, kwargs)
            for observe in self.observers:
                observe(facts)
            self._switch(self.pinned or self.policy(self, facts))
            return self._run(batch, facts)

    def _known(self, name: str) -> Variant:
        if name not in self.variants:
            raise StateError(f"there is no variant {name!r}; there are {sorted(self.variants)}")
        return self.variants[name]

    def _switch(self, name: str) -> None:
        """Change the variant between steps; home parameters and optimizer state stay where they are."""
        if name == self.current:
            return
        self._known(name)
        self.variants[self.current].flush()
        self.buffers.sync()
        self.current = name
        self.switches += 1

    def _agree(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[ReadBatch, StepFacts]:
        """Read the batch and agree with all ranks; an error on one rank is raised on all."""
        batch: ReadBatch | None = None
        local: LocalFacts | HetuFxError
        try:
            batch = read_batch(args, kwargs, self.programs, self.model.training)
            local = replace(batch.facts, compute_seconds=self.report.timer.seconds)
        except HetuFxError as error:
            local = error
        facts = agree(self.table, local)
        assert batch is not None
        if self.settings.shared:
            facts = replace(facts, counts=batch.facts.counts)
        return batch, facts

    def _run(self, batch: ReadBatch, facts: StepFacts) -> Any:
        rows = self._rows(facts)
        if batch.program.graph.training and torch.is_grad_enabled():
            self.step += 1
        variant = self.variants[self.current]
        inputs = StepInputs(
            batch=batch,
            counts=facts.counts,
            rows=rows,
            step=self.step,
            buffers=self.buffers,
            seed=self.settings.seed or 0,
            shared=self.settings.shared,
            wants_values=self._wants_values(batch.program.graph),
            syncs_gradients=self.syncs_gradients,
        )
        with without_autocast():
            made = run_step(variant, inputs)
        self.report = StepReport(self.current, tuple(map(len, rows.pipelines)), made.timer)
        output = batch.program.graph.rebuild(made.values)
        if self.programs.loss_fn is None:
            return output
        return LossAndOutput(made.values.get(batch.program.loss_name), output)

    def _rows(self, facts: StepFacts) -> RowPlan:
        if self.settings.shared and len(set(facts.rows)) > 1:
            raise BatchError(
                f"data='global' means the same batch on every rank, but the ranks bring {list(facts.rows)} rows; "
                f"use data='per_rank' if each rank has rows of its own"
            )
        if sum(facts.rows) == 0:
            raise BatchError("the batch has no rows on any rank")
        return plan_rows(self.variants[self.current].plan, facts.rows, shared=self.settings.shared)

    def _wants_values(self, graph: Graph) -> bool:
        if graph.loss is None or self.settings.outputs == "all":
            return True
        return self.settings.outputs == "auto" and not graph.training

    def close(self) -> None:
        """Forget variants; groups are left to torch.distributed."""
        self.variants.clear()


def names_of(plans: Sequence[Plan]) -> list[str]:
    """Return a name for each plan: its own, or a number."""
    return [plan.name or f"variant{i}" for i, plan in enumerate(plans)]


Policy = Callable[["Runtime", StepFacts], str]


def choose_variant(runtime: Runtime, facts: StepFacts) -> str:
    """Choose the variant for a batch: of those that take its longest sequence, the one predicted fastest."""
    variants = [
        VariantFacts(
            name=name,
            max_length=variant.plan.max_length,
            predicted_seconds=variant.predicted_seconds,
            devices=variant.plan.devices,
            planned_rates=variant.planned_rates,
        )
        for name, variant in runtime.variants.items()
    ]
    return choose(variants, BatchFacts(facts.longest, sum(facts.rows)), runtime.health)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run a graph as it is: the casts of an ambient autocast were written into it when it was captured."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
