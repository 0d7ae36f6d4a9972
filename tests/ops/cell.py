"""Cells of the table: an op under a plan, as all ranks of one process, beside plain PyTorch on one device."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from hetu_fx.cli.verdict import judge
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.errors import CommError, HetuFxError, PlanError
from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.transforms.layouts.annotate import asked_for
from tests.ops.database import OpCall, calls, database, dtype_of
from tests.ops.model import Embedding, OpModel, embedded

PLANS: Mapping[str, Plan] = {
    "data": Plan.data_parallel((0, 1), (3, 1)),
    "tensor": Plan.tensor_parallel((0, 1)),
    "mixed": Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)),)))),
}
MOST_SPLITS = {"tensor": 4, "mixed": 2}
"""Of how many classes of dims it is tried, under which plan, what becomes of the op when a group splits them."""
TOLERANCE = 1e-8
"""Relative, of float64; some ops (inverses, decompositions) magnify rounding."""
CAST_TOLERANCE = 1e-4
"""Of ops whose results are no numbers of 64 bits."""
HOW = Lockstep()


class Kind(Enum):
    """What became of a case, from best to worst."""

    RIGHT = "right"
    REFUSED = "refused"
    CRASH = "crash"
    WRONG = "wrong"


class Apart(Enum):
    """Why an op has no cells: plain PyTorch itself does not train a model with it."""

    DTYPE = "no dtype of 64 bits"
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
            made = self.model.results({name: tensor.clone() for name, tensor in self.batch.items()})
        return TOLERANCE if all(tensor.dtype in (torch.float64,) for tensor in made) else CAST_TOLERANCE


def findings(name: str, seed: int, samples: int) -> list[Finding] | Apart:
    """Return what becomes of an op in all embeddings with so many samples each, or why plain PyTorch has none."""
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
    """Return a case that trains on one device, with scales that differ if the op's domain allows it."""
    for jitter in (0.1, 0.0):
        torch.manual_seed(seed)
        try:
            made = embedded(database()[name].op, call, embedding, jitter)
            if made is not None and _trains(*made):
                return Case(title, *made)
        except Exception:  # noqa: BLE001 - torch's op does not take such operands: no case of it
            continue
    return None


def _trains(model: OpModel, batch: Mapping[str, Tensor]) -> bool:
    with quiet():
        step = train_alone(model, [dict(batch)], HOW).steps[0]
    numbers = [step.loss, *(float(gradient.abs().sum()) for gradient in step.gradients.values())]
    return bool(step.gradients) and all(map(math.isfinite, numbers))


def try_case(case: Case, plans: Mapping[str, Plan] = PLANS) -> list[Finding] | Apart:
    """Train a case under plans, and say what became of each."""
    with quiet():
        try:
            captured = HOW.capture(case.model, dict(case.batch))
        except Exception as error:  # noqa: BLE001 - whatever is raised is what is looked for
            if not _is_capturable(case):
                return Apart.NOT_CAPTURABLE
            return [Finding(plan, case.name, *_raised(error)) for plan in plans]
        alone = _expected(case, captured)
        if isinstance(alone, Exception):
            return [Finding(plan, case.name, *_raised(alone)) for plan in plans]
        return [
            Finding(name, f"{case.name}{_text(way.split)}", *_tried(case, captured, alone, way))
            for name, plan in plans.items()
            for way in _ways(plan, captured, MOST_SPLITS.get(name, 0))
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
        return bool(asked_for(plan, factors))
    except PlanError:
        return False


def _text(split: Sequence[tuple[str, int]]) -> str:
    return "".join(f", {name} split in dim {dim}" for name, dim in split)


def _expected(case: Case, captured: GraphExecution) -> Trained | Exception:
    """Return what one device makes: plain PyTorch, but for ops that draw random numbers, which are hetu_fx's own."""
    batches = [dict(case.batch)]
    alone = [_trained_plainly(case, seed) for seed in (0, 1)]
    if alone[0].steps[0].loss == alone[1].steps[0].loss:
        return alone[0]
    try:
        return HOW.train(case.model, batches, Plan.single(), captured)
    except Exception as error:  # noqa: BLE001 - as above
        return error


def _trained_plainly(case: Case, seed: int) -> Trained:
    torch.manual_seed(seed)
    return train_alone(case.model, [dict(case.batch)], HOW)


def _tried(case: Case, captured: GraphExecution, alone: Trained, plan: Plan) -> tuple[Kind, str]:
    try:
        made = HOW.train(case.model, [dict(case.batch)], plan, captured)
    except Exception as error:  # noqa: BLE001 - as above
        return _raised(error)
    verdict = judge("", alone, made, case.tolerance, "")
    if verdict.verdict == "equal":
        return Kind.RIGHT, ""
    (step,) = verdict.steps
    return Kind.WRONG, (
        f"loss {step.loss_difference:.1e} off, gradient of {step.worst_gradient} {step.gradient_difference:.1e}, "
        f"{verdict.worst_parameter} {verdict.parameter_difference:.1e}"
    )


def _raised(error: Exception) -> tuple[Kind, str]:
    """Ranks that go apart, or wait in vain, have not refused anything."""
    refused = isinstance(error, HetuFxError) and not isinstance(error, CommError)
    return Kind.REFUSED if refused else Kind.CRASH, f"{type(error).__name__}: {error}"


def _is_capturable(case: Case) -> bool:
    try:
        torch.export.export(case.model, (), dict(case.batch), strict=False)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def worst(found: Sequence[Finding], plan: str) -> Finding | None:
    """Return the worst of what was found under a plan."""
    order = list(Kind)
    return max((one for one in found if one.plan == plan), key=lambda one: order.index(one.kind), default=None)


@contextmanager
def quiet() -> Iterator[Any]:
    """Let nobody be warned: the table says what is to be said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
