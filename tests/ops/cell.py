"""Cells of the table: an op under a plan, as all ranks of one process, beside plain PyTorch on one device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.transforms.layouts.annotate import classes_to_split
from tests.ops.database import READ_BEYOND, OpCall, calls, database, dtype_of
from tests.ops.model import HOLDINGS, Embedding, OpModel, embedded
from tests.ops.trial import Kind, Trial, quiet, raised, trains

PLANS: Mapping[str, Plan] = {
    "data": Plan.data_parallel((0, 1), (3, 1)),
    "tensor": Plan.tensor_parallel((0, 1)),
    "mixed": Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)),)))),
}
MOST_SPLITS = {"tensor": 3, "mixed": 1}
"""Of how many classes of dims it is tried, under which plan, what becomes of the op when a group splits them."""
TOLERANCE = 1e-8
"""Relative, of float64; some ops (inverses, decompositions) magnify rounding."""
ROUNDED = {
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 4e-3,
    torch.complex32: 4e-3,
    torch.bfloat16: 3e-2,
}
"""The same of ops whose results are of a narrower dtype, in which gradients are rounded."""


class Apart(Enum):
    """Why an op has no cells: plain PyTorch itself does not train a model with it."""

    DTYPE = "no dtype of 64 bits"
    READS_BEYOND = "plain PyTorch reads and writes beyond operands that do not fit together, and so ends the process"
    NOT_DIFFERENTIABLE = "no gradient, or none that is finite"
    NOT_CAPTURABLE = "torch.export does not capture it"


@dataclass(frozen=True)
class Finding:
    """What became of a case under a plan: `case` names embedding and sample, `why` says what is not right."""

    plan: str
    case: str
    kind: Kind
    why: str = ""


@dataclass(frozen=True)
class Case:
    """A model around a call, a batch, and how it was made."""

    name: str
    model: OpModel
    batch: Mapping[str, Tensor]

    @property
    def tolerance(self) -> float:
        """Return how far numbers may be apart."""
        with torch.no_grad():
            made = self.model.made({name: tensor.clone() for name, tensor in self.batch.items()})
        return max((ROUNDED.get(tensor.dtype, TOLERANCE) for tensor in made), default=TOLERANCE)


def findings(name: str, seed: int, samples: int) -> list[Finding] | Apart:
    """Return what becomes of an op in all embeddings with so many samples each, or why plain PyTorch has none."""
    if name in READ_BEYOND:
        return Apart.READS_BEYOND
    if dtype_of(name) is None:
        return Apart.DTYPE
    found: list[Finding] = []
    apart = Apart.NOT_DIFFERENTIABLE
    for case in cases(name, seed, samples):
        made = try_case(case)
        if isinstance(made, Apart):
            apart = made
        else:
            found += made
    return found or apart


def cases(name: str, seed: int, samples: int) -> Iterator[Case]:
    """Yield the cases of an op that train on one device: of each embedding the first, and others by the seed."""
    given = list(calls(name, seed))
    order = [*range(len(given))]
    random.Random(seed).shuffle(order)
    order = list(dict.fromkeys([0, *order]))[: len(given)]
    for embedding in Embedding:
        taken = 0
        for i in order:
            case = _case(name, given[i], embedding, f"{embedding.name.lower()} {i}", seed)
            if case is not None:
                yield case
                taken += 1
            if taken == samples:
                break


def _case(name: str, call: OpCall, embedding: Embedding, title: str, seed: int) -> Case | None:
    """Return a case that trains on one device."""
    for holding in HOLDINGS:
        torch.manual_seed(seed)
        try:
            made = embedded(database()[name].op, call, embedding, holding)
            if made is not None and trains(made[0], [made[1]]):
                return Case(title, *made)
        except Exception:  # torch's op does not take such operands
            continue
    return None


def try_case(case: Case, plans: Mapping[str, Plan] = PLANS) -> list[Finding] | Apart:
    """Train a case under plans, and say what became of each."""
    try:
        trial = Trial(case.model, [case.batch], case.tolerance)
    except Exception as error:
        if not _is_capturable(case):
            return Apart.NOT_CAPTURABLE
        return [Finding(plan, case.name, *raised(error)) for plan in plans]
    return [
        Finding(name, f"{case.name}{_text(way.split)}", *trial.under(way))
        for name, plan in plans.items()
        for way in _ways(plan, trial.captured, MOST_SPLITS.get(name, 0))
    ]


def _ways(plan: Plan, captured: GraphExecution, most: int) -> Iterator[Plan]:
    """Yield a plan, and the plan with each class of dims split that can be, at most so many."""
    yield plan
    factors = captured.program.factors
    splits = filter(None, (factors.occurrences(cls)[:1] for cls in factors.classes))
    ways = (replace(plan, split=split) for split in splits)
    yield from itertools.islice((way for way in ways if _can_split(way, factors)), most)


def _can_split(plan: Plan, factors: FactorMap) -> bool:
    try:
        return bool(classes_to_split(plan, factors))
    except PlanError:
        return False


def _text(split: Sequence[tuple[str, int]]) -> str:
    return "".join(f", {name} split in dim {dim}" for name, dim in split)


def _is_capturable(case: Case) -> bool:
    try:
        with quiet():
            torch.export.export(case.model, (), dict(case.batch), strict=False)
    except Exception:
        return False
    return True


def worst(found: Sequence[Finding], plan: str) -> Finding | None:
    """Return the worst of what was found under a plan."""
    order = list(Kind)
    return max((one for one in found if one.plan == plan), key=lambda one: order.index(one.kind), default=None)
