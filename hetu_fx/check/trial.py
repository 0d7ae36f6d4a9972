"""A step of a case as all ranks of its plan, in this process, beside one device; and another one like it.

The second step is what shows state that the module keeps in Python, whoever keeps it: a graph repeats what it was when
it was captured. Where one device gives the same twice, and has no buffers, the first step is enough.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hetu_fx.base.device_types import HOST
from hetu_fx.base.dtypes import is_real
from hetu_fx.check.small_batch import split_rows_by_rank
from hetu_fx.check.verdict import differences
from hetu_fx.errors import CommError
from hetu_fx.graph import meta
from hetu_fx.graph.bind import Batch, flatten_batch, output_and_loss
from hetu_fx.lockstep import Lockstep, Step, Trained, find_loss, train_alone
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.switching.eager.random_numbers import RandomNumbers
from hetu_fx.switching.eager.row_mode import RowMode
from hetu_fx.switching.graph_execution import GraphExecution

SEED = 0
_STEPS = 2


@dataclass(frozen=True)
class Tolerance:
    """How much may differ where some numbers are of a dtype.

    Attributes:
        relative: of a tensor's norm.
        negligible: a share of the largest norm, of which smaller tensors may differ by as much.
    """

    relative: float
    negligible: float


_TOLERANCES = {
    torch.float64: Tolerance(1e-7, 1e-4),
    torch.float32: Tolerance(3e-4, 1e-2),
    torch.bfloat16: Tolerance(0.1, 0.1),
    torch.float16: Tolerance(3e-2, 0.1),
}
_LOWEST = Tolerance(0.3, 0.1)
_RECAST = Tolerance(1e-6, 1e-4)
"""Where a module in float64 may cast to float32 inside, which a program that was recast does not show."""


@dataclass(frozen=True, eq=False)
class Case:
    """A model, a batch and a plan, small enough to be tried.

    Attributes:
        model: the model, with values, in training mode or not as the user's is.
        loss_fn: what makes the loss, if the model does not.
        batch: the whole batch.
        plan: the plan.
        rows: which rows each rank brings; None: all bring the whole batch.
        row_dims: which dim of each input counts rows.
        dtype: of real numbers, as far as the model does not say another one.
        eager: how replicas share the batch where the module itself runs on every rank; None: graphs run.
        is_recast: its graph is made of the whole model's, and does not show casts inside the module.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    batch: Batch
    plan: Plan
    rows: tuple[int, ...] | None
    row_dims: Mapping[str, int]
    dtype: torch.dtype
    eager: RowMode | None = None
    is_recast: bool = False

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return 1 + max(self.plan.devices)

    def how(self, seconds: float | None = None) -> Lockstep:
        """Return how it is trained as all ranks, for so long at most."""
        return Lockstep(
            None,
            ranks=self.world,
            rows=self.rows,
            loss_fn=self.loss_fn,
            row_dims={name: self.row_dims.get(name) for name in flatten_batch(self.batch)[1]},
            seed=SEED,
            eager=self.eager,
            seconds=seconds,
        )


@dataclass(frozen=True, eq=False)
class TrialReference:
    """What one device makes of a case.

    Attributes:
        module: as the module itself.
        is_random: it draws random numbers.
        remembers: two steps are unlike, though nothing is trained, nothing drawn, and there are no buffers.
    """

    module: Trained
    is_random: bool
    remembers: bool


@dataclass(frozen=True, eq=False)
class Found:
    """What a trial has found.

    Attributes:
        losses: of one device, and of the plan.
        gradients: by how much each differs, relative, in the order of the model.
        buffers: the same of buffers after the step.
        tolerance: how much may differ.
        failure: what kept the ranks from going through a step that one device goes through.
        step: which step the losses are of: the first that differs, or the last.
        remembers: one device gives something else in a second step like the first.
        shared_out: the loss is a sum over rows, which ranks share out.
        beside_graph: the plan was held against the captured graph on one device, as the module draws other numbers.
    """

    losses: tuple[float, float] = (0.0, 0.0)
    gradients: Mapping[str, float] | None = None
    buffers: Mapping[str, float] | None = None
    tolerance: Tolerance = _LOWEST
    failure: str = ""
    step: int = 1
    remembers: bool = False
    shared_out: bool = False
    beside_graph: bool = False

    @property
    def loss_difference(self) -> float:
        """Return by how much the loss differs, relative to it."""
        alone, made = self.losses
        return abs(alone - made) / max(abs(alone), 1e-300) if alone == alone and made == made else float("inf")

    @property
    def wrong(self) -> dict[str, float]:
        """Return the gradients and buffers that differ by more than they may."""
        pairs = {**(self.gradients or {}), **{f"buffer {name}": d for name, d in (self.buffers or {}).items()}}
        return {name: difference for name, difference in pairs.items() if difference > self.tolerance.relative}

    @property
    def loss_is_wrong(self) -> bool:
        """Tell whether the loss differs by more than it may."""
        return self.loss_difference > self.tolerance.relative

    @property
    def is_right(self) -> bool:
        """Tell whether all is what one device gives."""
        return not (self.failure or self.loss_is_wrong or self.wrong)

    @property
    def most(self) -> float:
        """Return the largest difference."""
        return max([self.loss_difference, *(self.gradients or {}).values(), *(self.buffers or {}).values()])


@contextmanager
def _seeded() -> Iterator[RandomNumbers]:
    """Draw the same random numbers inside, each time; give what they are drawn from."""
    with RandomNumbers.of(HOST).drawn(HOST):
        torch.default_generator.manual_seed(SEED)  # of the host alone
        random.seed(SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED)
        yield RandomNumbers.of(HOST)


def alone(case: Case) -> TrialReference:
    """Train steps of a case on one device, as the module itself: the first alone where it tells all."""
    with _seeded() as numbers:
        made = train_alone(case.model, [case.batch] * _STEPS, case.how())
        is_random = RandomNumbers.of(HOST) != numbers
    first, *others = made.steps
    is_alike = all(_are_same(first, other) for other in others)
    is_told = is_alike and not made.state
    remembers = not (is_alike or is_random or made.state)
    return TrialReference(replace(made, steps=[first]) if is_told else made, is_random, remembers)


def _are_same(one: Step, other: Step) -> bool:
    """Tell whether two steps have the same numbers."""
    pairs = ((one.gradients[name], other.gradients.get(name)) for name in one.gradients)
    return one.loss == other.loss and all(b is not None and torch.equal(a, b) for a, b in pairs)


def run_trial(
    case: Case,
    reference: TrialReference,
    captured: GraphExecution | None,
    seconds: float | None = None,
) -> Found:
    """Train as many steps of a case as all ranks, and hold them against one device.

    A module that draws random numbers draws others than its graph: the plan is held against the graph on one device.
    The least exact dtype in the graph tells how much may differ.

    Raises:
        HetuFxError: the plan is refused, for the model or for the case's sizes.
        TimeoutError: it takes longer than `seconds`.
    """
    beside_graph = reference.is_random and case.eager is None
    right = reference.module
    batches = [case.batch] * len(right.steps)
    if beside_graph:
        single = replace(case, plan=Plan.single(0), rows=None)
        right = single.how(seconds).train(case.model, batches, single.plan, captured)
    shared_out = case.eager is not None and case.eager.adds_up and case.rows is not None and case.world > 1
    if shared_out:
        right = _divided(right, case.world)
    lowest = case.dtype if captured is None else _lowest_dtype(captured.program)
    tolerance = _RECAST if case.is_recast else _TOLERANCES.get(lowest, _LOWEST)
    try:
        with _seeded():
            made = case.how(seconds).train(case.model, batches, case.plan, captured)
    except CommError as error:
        return Found(tolerance=tolerance, failure=f"{type(error).__name__}: {error}", beside_graph=beside_graph)
    found = replace(_compare_steps(right, made, tolerance), shared_out=shared_out)
    if case.eager is None and not found.is_right:
        shared = _compare_steps(_divided(right, case.world), made, tolerance)
        found = replace(shared, shared_out=True) if shared.is_right and _is_sum(case, right) else found
    return replace(found, beside_graph=beside_graph, remembers=reference.remembers)


def _compare_steps(right: Trained, made: Trained, tolerance: Tolerance) -> Found:
    """Compare steps under a plan with those of one device, up to the first that differs."""
    buffers = differences(right.state, made.state, tolerance.negligible)
    found = Found()
    for number, (of_one, of_all) in enumerate(zip(right.steps, made.steps, strict=True), 1):
        found = Found(
            losses=(of_one.loss, of_all.loss),
            gradients=differences(of_one.gradients, of_all.gradients, tolerance.negligible),
            buffers=buffers,
            tolerance=tolerance,
            step=number,
        )
        if not found.is_right:
            break
    return found


def _divided(right: Trained, ranks: int) -> Trained:
    """Return a training whose loss is shared out among ranks, as DistributedDataParallel does it."""
    steps = [
        Step(one.loss / ranks, {n: gradient / ranks for n, gradient in one.gradients.items()}) for one in right.steps
    ]
    return Trained(steps, right.state)


def _is_sum(case: Case, right: Trained) -> bool:
    """Tell whether the loss of a batch is the sum of those of its ranks' rows."""
    rows = case.rows or ()
    return len(rows) > 1 and loss_is_additive(case, rows, right.steps[0].loss, _TOLERANCES[torch.float32].relative)


def loss_is_additive(case: Case, counts: Sequence[int], loss: float, tolerance: float) -> bool:
    """Tell whether the loss of a batch is the sum of those of so many of its rows each."""
    total = 0.0
    with _seeded(), torch.no_grad():
        for own in split_rows_by_rank(case.batch, case.row_dims, counts):
            output, made = output_and_loss(case.how().copied(case.model), case.loss_fn, own)
            total += float(find_loss(output if case.loss_fn is None else made))
    return loss != 0 and abs(total - loss) <= tolerance * abs(loss)


def _lowest_dtype(program: Program) -> torch.dtype:
    """Return the least exact dtype of the values that carry gradients."""
    found = {meta.dtype(node) for node in program.flow.differentiable if meta.is_tensor(node)}
    real = list(filter(is_real, found))
    return max(real, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
