"""One model twice: trained on one device, and under a plan; what the feature checks share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hetu_fx
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.end_to_end.cells import DEFAULT_TOLERANCE, LOSS_FNS, TOLERANCES, Step, in_double, make_batch, make_model

WORLD = 4
Batch = Mapping[str, Tensor]
Make = Callable[[str], nn.Module]

adamw = partial(torch.optim.AdamW, lr=1e-2)

_worlds: dict[int, dist.ProcessGroup] = {}


def world_of(size: int) -> dist.ProcessGroup | None:
    """Give the group of the first ranks, None for ranks outside; every rank of the whole world calls it."""
    if not _worlds:
        _worlds.update({n: dist.new_group(list(range(n))) for n in range(1, WORLD + 1)})
    return _worlds[size] if dist.get_rank() < size else None


def one(*stages: Stage, rows: int = 1, micro_batches: int = 1) -> Pipeline:
    return Pipeline(stages, share=rows, micro_batches=micro_batches)


def batch_of(name: str, rows: int, length: int = 11, seed: int = 0) -> dict[str, Tensor]:
    """Make a global batch; the same on every rank."""
    return make_batch(name, Step("", rows, length), seed)


def rows_of(batch: Batch, counts: Sequence[int], rank: int | None = None) -> dict[str, Tensor]:
    """Give the rows that a rank brings, of which rank r brings counts[r]."""
    rank = dist.get_rank() if rank is None else rank
    start = sum(counts[:rank])
    return {name: t[start : start + counts[rank]] if t.dim() else t for name, t in batch.items()}


class Twins:
    """A plain model and its parallel twin, each with an optimizer, fed with the same batches."""

    def __init__(
        self,
        name: str,
        plan: Any,
        group: dist.ProcessGroup,
        *,
        make: Make = make_model,
        optimizer: Callable[..., torch.optim.Optimizer] = adamw,
        example: Batch | None = None,
        **options: Any,
    ) -> None:
        in_double()
        self.name, self.loss_fn = name, LOSS_FNS.get(name)
        self.tolerance = TOLERANCES.get(name, DEFAULT_TOLERANCE)
        self.plain = make(name)
        self.model = copy.deepcopy(self.plain)
        self.optimizers = [optimizer(model.parameters()) for model in (self.plain, self.model)]
        self.shared = options.get("data") == "global"
        options = {"loss_fn": self.loss_fn, **options}
        hetu_fx.auto_parallelize(self.model, example or batch_of(name, 5), plan=plan, process_group=group, **options)

    def mine(self, batch: Batch, counts: Sequence[int]) -> dict[str, Tensor]:
        """Give what this rank passes in."""
        return dict(batch) if self.shared else rows_of(batch, counts)

    def gradients(self, batch: Batch, counts: Sequence[int] = ()) -> Tensor:
        """Run both on a batch, forward and backward, and compare loss and gradients; give the loss."""
        output = self.plain(**batch)
        expected = loss_of(output if self.loss_fn is None else self.loss_fn(output, **batch))
        loss = loss_of(self.model(**self.mine(batch, counts)))
        expected.backward()
        loss.backward()
        assert abs(float(loss) - float(expected)) <= self.tolerance * abs(float(expected)), (loss, expected)
        self.same_gradients()
        return loss

    def step(self, batch: Batch, counts: Sequence[int] = ()) -> None:
        """Train both for one step, and compare."""
        self.gradients(batch, counts)
        self.update()

    def update(self) -> None:
        """Step both optimizers, compare the parameters, forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.same_parameters()

    def same_gradients(self) -> None:
        """Compare every gradient."""
        same_tensors(gradients_of(self.model), gradients_of(self.plain), self.tolerance)

    def same_parameters(self) -> None:
        """Compare every parameter; AdamW divides by small gradients, which makes rounding visible."""
        same_tensors(wholes(self.model), wholes(self.plain), 10 * self.tolerance)


def loss_of(output: Any) -> Tensor:
    """Give the loss of whatever a model returns."""
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output.loss


def whole(tensor: Tensor | None) -> Tensor | None:
    """Give the whole of a home tensor; collective."""
    return None if tensor is None else hetu_fx.full_tensor(tensor)


def wholes(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def same_tensors(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], limit: float) -> None:
    """Compare tensors by name, relative to their norms, with the largest norm of all as a floor."""
    floor = 1e-5 * max((float(t.norm()) for t in expected.values() if t is not None), default=0.0)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert (other is None) == (tensor is None), f"{name}: {other is None} {tensor is None}"
        if tensor is not None and other is not None:
            difference = float((other - tensor).norm() / (tensor.norm() + floor + 1e-30))
            assert difference <= limit, f"{name} differs by {difference:.1e}"


def dp(*rows: int) -> Plan:
    """Give a plan with one device per replica."""
    return Plan(tuple(one(Stage((rank,)), rows=share) for rank, share in enumerate(rows)))
