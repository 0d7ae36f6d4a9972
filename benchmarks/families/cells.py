"""One cell of the coverage table: a family under a plan against one device, in float64 where torch can."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hetu_fx
from benchmarks.families.batches import Batch
from benchmarks.families.families import Family
from hetu_fx.plans.plan import Pipeline, Plan, Stage

WORLD = 3
SIZES = ((8, 11), (7, 13))  # rows and tokens of the batches; the first is the example
LIMITS = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-4)}  # of the loss and of every gradient
MakePlan = Callable[[int], Plan]


def _data_parallel(micro_batches: int) -> Plan:
    return Plan((Pipeline((Stage((0,)),), share=3), Pipeline((Stage((1,)),), share=1)))


def _tensor_parallel(micro_batches: int, ratios: tuple[int, ...] = ()) -> Plan:
    return Plan((Pipeline((Stage((0, 1), ratios),)),))


def _pipeline(micro_batches: int) -> Plan:
    return Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=micro_batches),))


def _unequal_replicas(micro_batches: int) -> Plan:
    return Plan((Pipeline((Stage((0, 1)),), share=2), Pipeline((Stage((2,)),), share=1)))


PLANS: Mapping[str, MakePlan] = {
    "DP 3:1": _data_parallel,
    "TP2": _tensor_parallel,
    "TP2 3:1": partial(_tensor_parallel, ratios=(3, 1)),
    "PP2": _pipeline,
    "TP2 + TP1": _unequal_replicas,
}


class InFloat64(TorchFunctionMode):
    """Lets float64 stay what it is where a model would cast it to float32, so that rounding does not hide mistakes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if not (args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64):
            return func(*args, **given)
        if func is Tensor.float:
            return args[0]
        kept = [_kept(argument) for argument in args]
        return func(*kept, **{name: _kept(argument) for name, argument in given.items()})


def _kept(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@dataclass(frozen=True, slots=True)
class Truth:
    """A batch, and the loss and the gradients that one device gets from it."""

    batch: Batch
    loss: float
    gradients: Sequence[Tensor | None]


class Subject:
    """A family on trial: its model, what one device computes, and its parallel twin once there is one."""

    def __init__(self, family: Family) -> None:
        self.family = family
        torch.manual_seed(17)
        self.plain = family.make().to(family.dtype)
        self.truths = [self._truth(*sizes, seed) for seed, sizes in enumerate(SIZES)]
        self.model: nn.Module | None = None

    def try_plan(self, name: str) -> dict[str, float]:
        """Run every batch under a plan; return the worst relative difference of the loss and of any gradient.

        Collective over all ranks. A model that has failed is forgotten: the next plan starts with a new one.
        """
        with exactly(self.family.dtype):
            try:
                model = self._under(name)
                found = [self._compare(model, truth) for truth in self.truths]
            except BaseException:
                self.model = None
                gc.collect()
                raise
        return {what: max(each[what] for each in found) for what in found[0]}

    def _truth(self, rows: int, length: int, seed: int) -> Truth:
        torch.manual_seed(100 + seed)
        length = SIZES[0][1] if self.family.fixed_length else length
        batch = in_dtype(self.family.batch(rows, length), self.family.dtype)
        with exactly(self.family.dtype):
            loss = loss_of(self.plain(**batch))
            loss.backward()
        gradients = [parameter.grad for parameter in self.plain.parameters()]
        self.plain.zero_grad()
        return Truth(batch, loss.item(), gradients)

    def _under(self, name: str) -> nn.Module:
        plan = PLANS[name](self.family.micro_batches)
        if self.model is not None:
            self.model.hetu.switch(self.model.hetu.add_variant(plan, name))  # type: ignore[union-attr, operator]
            return self.model
        model = copy.deepcopy(self.plain)
        hetu_fx.auto_parallelize(model, self.truths[0].batch, plan=plan)
        self.model = model
        return model

    def _compare(self, model: nn.Module, truth: Truth) -> dict[str, float]:
        model.zero_grad()
        loss = loss_of(model(**own_rows(truth.batch)))
        loss.backward()
        wholes = [None if p.grad is None else whole(p.grad) for p in model.parameters()]
        error = abs(loss.item() - truth.loss) / abs(truth.loss)
        return {"loss": comparable(error), "gradient": worst_difference(wholes, truth.gradients)}


def exactly(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Keep float64 while a model computed in it is run or captured."""
    return InFloat64() if dtype is torch.float64 else nullcontext()


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Cast the floats of a batch."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def own_rows(batch: Batch) -> Batch:
    """Cut a batch unevenly over the ranks; the first brings most."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = next(iter(batch.values())).size(0)
    cuts = [rows - rows // (2**i) for i in range(world)] + [rows]
    return {name: tensor[cuts[rank] : cuts[rank + 1]] for name, tensor in batch.items()}


def loss_of(output: Any) -> Tensor:
    """Give the loss of whatever a model returns."""
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def whole(tensor: Tensor) -> Tensor:
    """Give the whole of a home tensor; collective."""
    return hetu_fx.full_tensor(tensor.detach())


def worst_difference(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Give the worst difference relative to a tensor's norm, with a floor of 1e-5 of the largest norm of all."""
    floor = 1e-5 * max(float(tensor.norm()) for tensor in expected if tensor is not None)
    return max(_difference(one, other, floor) for one, other in zip(found, expected, strict=True))


def _difference(found: Tensor | None, expected: Tensor | None, floor: float) -> float:
    if found is None or expected is None:
        return comparable(sum(float(tensor.norm()) for tensor in (found, expected) if tensor is not None))
    return comparable(float((found - expected).norm() / (expected.norm() + floor)))


def comparable(difference: float) -> float:
    """Give infinity for what is no number, so that it is the worst of all."""
    return math.inf if math.isnan(difference) else difference
