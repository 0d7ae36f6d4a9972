"""One cell of the coverage table: a family under a plan against one device, in float64 where torch can."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.families.batches import Batch
from benchmarks.families.family import Family
from hetu_fx.cli.compare import draws_random_numbers
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.deduction.factors.analyse import UnknownOpWarning
from hetu_fx.errors import HetuFxError
from hetu_fx.lockstep import Lockstep, RankTrained, Step, Trained, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage

SIZES = ((8, 11), (7, 13))  # rows and tokens of the batches; the first is the example
AS_RANKS = Lockstep(partial(torch.optim.SGD, lr=0.0), ranks=3, rows=(4, 2, 2))  # every step with the same parameters
LIMITS = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-4)}  # of the loss and of every gradient
COMPARED, TORCH_COMPILE = ("loss", "gradient"), "torch.compile"
FLOOR = 1e-3  # of the largest gradient: in smaller ones an error counts that is 1e-13 of the largest
CAST_DOWN = 1e-6
"""How far from plain PyTorch a model may be under a plan of one device that has leaves, which may cast to float32."""
COMPILED_APART = 1e-5
"""How far from plain PyTorch `torch.compile` of a model may be, to be what compiled plans are compared with.

Compilers round functions of float32 in their own way, which models show that compute sines of times in float32.
"""
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


class Subject:
    """A family on trial: its model, and what one device computes, as plain PyTorch.

    Whatever a model does that does not train plainly is raised.

    Args:
        family: what is on trial.
        how: it is trained under plans.
    """

    def __init__(self, family: Family, how: Lockstep = AS_RANKS) -> None:
        self.family, self._how = family, how
        torch.manual_seed(17)
        self.model = cast(family.make(), family.dtype)
        self.batches = [self._batch(*sizes, seed) for seed, sizes in enumerate(SIZES)]
        self.micro_batches = 1 if _has_batch_norm(self.model) else family.micro_batches
        with exactly(family.dtype):
            self.alone = train_alone(self.model, self.batches, how)
        if not all(map(_is_training, self.alone.steps)):
            raise NotTrainedError("the loss is no number, or gradients are none, all zero or no numbers")

    def capture(self) -> list[str]:
        """Capture the model, once for all ranks of all plans; return the names of ops without a rule."""
        with exactly(self.family.dtype), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.captured = self._how.capture(self.model, self.batches[0])
            program = self.captured.programs.first(self.batches[1], training=True)
            draws = draws_random_numbers(self.model, self.batches[0])
        if draws or program.graph.leaf_calls:  # ranks compute in float64 without the mode, but for what leaves cast
            single = self._how.train(self.model, self.batches, Plan.single(0), self.captured)
            if draws or max(worst_differences(single, self.alone).values()) <= CAST_DOWN:
                self.alone = single  # hetu_fx has random numbers of its own
        found = [warning.message for warning in told if issubclass(warning.category, UnknownOpWarning)]
        return sorted({str(message).split(" ")[1] for message in found})

    def try_plan(self, name: str) -> dict[str, float]:
        """Run every batch under a plan; return the worst relative difference of the loss and of any gradient.

        Where it is too large and plans are compiled, the reference is `torch.compile` of the model on one device, if
        that is near enough to the model as it is. The result then says how near.
        """
        try:
            made = self._how.train(self.model, self.batches, PLANS[name](self.micro_batches), self.captured)
        except Exception as error:
            self._check_is_compiled(error)
            raise
        found = worst_differences(made, self.alone)
        if self._how.backend is None or is_within_limits(found, self.family.dtype):
            return found
        compiled = self._compiled()
        apart = max(worst_differences(compiled, self.alone).values())
        return worst_differences(made, compiled) | {TORCH_COMPILE: apart} if apart <= COMPILED_APART else found

    def _check_is_compiled(self, failed: Exception) -> None:
        """Raise NotTrainedError where plans are compiled, and `torch.compile` of the model fails as one of them did."""
        if self._how.backend is None or isinstance(failed, HetuFxError):
            return
        try:
            self._compiled()
        except Exception as error:
            inner = getattr(error, "inner_exception", error)  # what a backend raises in a forward pass is wrapped
            if type(failed) is not type(inner):
                raise failed from error
            raise NotTrainedError(f"torch.compile of the model on one device fails too: {error}") from error

    def _compiled(self) -> Trained:
        """Train the model on one device as `torch.compile` makes it."""
        compiled: Any = torch.compile(self.model, backend=self._how.backend)
        with exactly(self.family.dtype):
            made = train_alone(compiled, self.batches, self._how)
        return replace(made, steps=[replace(step, gradients=_by_own_names(step.gradients)) for step in made.steps])

    def try_rank(self, name: str, table: GroupTable) -> RankTrained:
        """Run every batch under a plan as one rank, of processes that all do; return what it has."""
        plan = PLANS[name](self.micro_batches)
        return self._how.train_rank(self.model, self.batches, plan, table, self.captured)

    def _batch(self, rows: int, length: int, seed: int) -> Batch:
        torch.manual_seed(100 + seed)
        length = SIZES[0][1] if self.family.fixed_length else length
        return in_dtype(self.family.batch(rows, length), self.family.dtype)


def _by_own_names(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients by the names that parameters have in the model that was compiled."""
    return {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}


class NotTrainedError(Exception):
    """What plain PyTorch makes of a model is no training."""


def _is_training(step: Step) -> bool:
    norm = sum(float(gradient.norm()) for gradient in step.gradients.values())
    return math.isfinite(step.loss) and math.isfinite(norm) and norm > 0


def _has_batch_norm(model: nn.Module) -> bool:
    """Tell whether the model works out something from the whole batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def worst_differences(made: Trained, alone: Trained) -> dict[str, float]:
    """Return the worst relative difference of the loss and of any gradient, of all steps."""
    found = [_differences(*steps) for steps in zip(made.steps, alone.steps, strict=True)]
    return {what: max(each[what] for each in found) for what in found[0]}


def is_within_limits(differences: Mapping[str, float], dtype: torch.dtype) -> bool:
    """Tell whether a cell is right."""
    return all(differences[what] <= limit for what, limit in zip(COMPARED, LIMITS[dtype], strict=True))


def _differences(made: Step, alone: Step) -> dict[str, float]:
    names = dict.fromkeys((*alone.gradients, *made.gradients))
    found, expected = ([step.gradients.get(name) for name in names] for step in (made, alone))
    error = abs(made.loss - alone.loss) / abs(alone.loss)
    return {"loss": comparable(error), "gradient": worst_difference(found, expected)}


def exactly(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Keep float64 while a model computed in it is run or captured."""
    return InFloat64() if dtype is torch.float64 else nullcontext()


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floats of a model, and its complex numbers to two of them; `Module.to` drops their second ones."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(dtype.to_complex() if tensor.is_complex() else dtype)
    return model


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Cast the floats of a batch."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def worst_difference(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Give the worst difference relative to a tensor's norm, with a floor: a share of the largest norm of all.

    The gradient of a bias before a batch norm is a sum that cancels: nothing but the rounding of what is larger.
    """
    floor = FLOOR * max(float(tensor.norm()) for tensor in expected if tensor is not None)
    return max(_difference(one, other, floor) for one, other in zip(found, expected, strict=True))


def _difference(found: Tensor | None, expected: Tensor | None, floor: float) -> float:
    if found is None or expected is None:
        return comparable(sum(float(tensor.norm()) for tensor in (found, expected) if tensor is not None))
    return comparable(float((found - expected).norm() / (expected.norm() + floor)))


def comparable(difference: float) -> float:
    """Give infinity for what is no number, so that it is the worst of all."""
    return math.inf if math.isnan(difference) else difference
