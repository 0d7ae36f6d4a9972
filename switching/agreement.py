"""The first act of a step: each rank reads its batch, and all agree on what it is, or refuse it together.

Inputs that must be the same on all ranks, compared by their values at the first steps and now and then after. What has
no rows is one value of the whole batch, and with `data="global"` all of it is. Where ranks pass others, each would
compute with its own: the loss is one rank's, the gradient another's. A number of 48 bits for all of them goes with what
ranks agree on in a step; details are exchanged where it differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hetu_fx.base.dtypes import as_reals, carries_gradient, is_real
from hetu_fx.comm_ops.wire.consensus import (
    LocalFacts,
    StepFacts,
    agree,
    all_gather_object,
    any_rank,
    hash_text,
    raise_on_all_ranks,
)
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import BatchError
from hetu_fx.switching.home.writes import Writes
from hetu_fx.switching.members import MemberWatch
from hetu_fx.switching.settings import Settings
from hetu_fx.switching.step.execution import Execution, Reading

_FIRST = 3  # batches of a form that are compared, one after another
_EVERY = 50  # and those after them: one of so many
_MOST_FORMS = 64
_CHUNK = 1 << 20  # elements that are looked at together: what that takes is freed before the next
_ROUNDING = 4  # units in the last place that devices of unlike types may differ by
_SHOWN = 4  # values in a message

Inputs = Callable[[], Mapping[str, Tensor]]
"""Gives the inputs that must be alike, by what they are; asked only where they are compared."""


class SameInputs:
    """Compares what the ranks pass of the inputs that must be alike.

    Args:
        table: the ranks.
        shared: every rank passes the same whole batch.
    """

    def __init__(self, table: GroupTable, *, shared: bool) -> None:
        self._table, self._shared = table, shared
        self._batches = Counter[str]()  # by form, of those that all ranks have agreed on

    def told(self, form: str, inputs: Inputs) -> float:
        """Return a number that is the same on ranks with the same inputs; 0 in a step that compares none."""
        count = self._batches[form]
        if self._table.size == 1 or (count >= _FIRST and count % _EVERY):
            return 0.0
        told = [f"{name} {digest(tensor)}" for name, tensor in inputs().items()]
        return float(1 + hash_text(" ".join(told))) if told else 0.0

    def check(self, facts: StepFacts, form: str, inputs: Inputs) -> None:
        """Refuse inputs that differ; collective where some do.

        Raises:
            BatchError: on every rank; names the inputs, what each rank passes, and the way out.
        """
        if len(self._batches) >= _MOST_FORMS and form not in self._batches:
            self._batches.clear()
        if len(set(facts.inputs) - {0.0}) > 1:
            own = {name: Summary.of(tensor) for name, tensor in inputs().items()}
            told = all_gather_object(self._table, own)
            unlike = {name: seen for name in own if are_unlike(seen := [of_rank[name] for of_rank in told])}
            if unlike:
                raise BatchError(self._problem(unlike))
        self._batches[form] += 1

    def _problem(self, unlike: Mapping[str, Sequence[Summary]]) -> str:
        told = "; ".join(
            f"{name} is " + ", ".join(f"{summary} on rank {rank}" for rank, summary in enumerate(seen))
            for name, seen in unlike.items()
        )
        if self._shared and any(name.startswith("input") for name in unlike):
            return (
                f"data='global' means the same whole batch on every rank, but {told}\nhint: pass the same batch on all "
                f"ranks (seed shuffling and augmentation equally), or use data='per_rank' if each rank has its own rows"
            )
        return (
            f"what has no rows belongs to the whole batch, but ranks have others: {told}\nhint: pass the same on all "
            f"ranks (work it out from all ranks' rows, or broadcast it); if an input has rows, name the dim that "
            f"counts them by row_dims"
        )


def digest(tensor: Tensor) -> int:
    """Return a number that is the same for tensors of equal elements, on whatever device they are.

    It is a sum of the elements' bits, each times an odd number of its own, in 64 bits, so the order does not matter.
    """
    flat = _plain(tensor).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = _bits(flat[start : start + _CHUNK])
        total += (bits * (torch.arange(start, start + bits.numel(), device=bits.device) * 0x9E3779B1 + 1 | 1)).sum()
    return hash_text(f"{tensor.dtype} {list(tensor.shape)} {total.item()}")


def _plain(tensor: Tensor) -> Tensor:
    found = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return as_reals(found)


def _bits(flat: Tensor) -> Tensor:
    """Return the elements' bits as integers; zeros of either sign are one number."""
    if is_real(flat.dtype) and flat.dtype.itemsize > 1:
        flat = flat + 0.0
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.dtype.itemsize]
    return flat.contiguous().view(whole).long()


@dataclass(frozen=True)
class Summary:
    """What a message says of a tensor on one rank.

    Attributes:
        shape: its shape.
        digest: see `digest`.
        infinite: a number for where it has infinities, and values that are no numbers.
        sums: of the other elements, of these times their place in the tensor (from 0 to 1), and of their sizes.
        rounding: how much of the last sum devices of unlike types may differ by; 0 for whole numbers.
        first: its first elements.
    """

    shape: tuple[int, ...]
    digest: int
    infinite: int
    sums: tuple[float, float, float]
    rounding: float
    first: tuple[float, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Summary:
        """Look at a tensor."""
        flat = _plain(tensor).reshape(-1).double()
        odd = flat.isposinf().byte() + 2 * flat.isneginf().byte() + 4 * flat.isnan().byte()
        shown, flat = flat[:_SHOWN].tolist(), flat.nan_to_num(0.0, 0.0, 0.0)
        places = torch.linspace(0, 1, flat.numel(), dtype=torch.float64, device=flat.device)
        sums = float(flat.sum()), float((flat * places).sum()), float(flat.abs().sum())
        exact = not carries_gradient(tensor.dtype)
        rounding = 0.0 if exact else _ROUNDING * torch.finfo(tensor.dtype).eps
        return cls(tuple(tensor.shape), digest(tensor), digest(odd), sums, rounding, tuple(shown))

    def __str__(self) -> str:
        more = ", ..." if len(self.first) == _SHOWN else ""
        values = ", ".join(f"{number:.6g}" for number in self.first)
        return f"[{values}{more}] (shape {list(self.shape)}, sum {self.sums[0]:.9g})"


def are_unlike(seen: Sequence[Summary]) -> bool:
    """Tell whether tensors of one shape differ by more than rounding; those of unlike shapes are filled up first."""
    first, *others = seen
    return all(other.shape == first.shape for other in others) and any(_differ(first, other) for other in others)


def _differ(one: Summary, other: Summary) -> bool:
    if one.digest == other.digest:
        return False
    if one.rounding == 0 or one.infinite != other.infinite:
        return True
    most = one.rounding * max(one.sums[2], other.sums[2])
    return not all(abs(a - b) <= most for a, b in zip(one.sums, other.sums, strict=True))


class Watcher(Protocol):
    """Goes along with a run: before every step it tells the other ranks something, and hears what all have told."""

    def tell(self) -> Mapping[str, float]:
        """Return facts of this rank, by their names in `StepFacts`."""

    def observe(self, facts: StepFacts) -> None:
        """Take in what all ranks have agreed on; on all ranks in the same order, so that it may be collective."""


class Agreement:
    """Reads batches, and agrees with all ranks on each.

    Args:
        writes: what tells whether scripts have written alike on all ranks.
        members: what tells whether scripts have made others of the model's parameters and buffers.
        own_seconds: returns what the last step took on this rank, by the names in `StepFacts`.

    Attributes:
        watchers: tell the other ranks something beside the facts of each batch, in this order.
    """

    def __init__(
        self,
        model: nn.Module,
        table: GroupTable,
        execution: Execution[Any],
        settings: Settings,
        writes: Writes,
        members: MemberWatch,
        own_seconds: Callable[[], Mapping[str, float]],
    ) -> None:
        self._model, self._table, self._execution, self._settings = model, table, execution, settings
        self._writes, self._members, self._own_seconds = writes, members, own_seconds
        self._same_inputs = SameInputs(table, shared=settings.shared)
        self.watchers: list[Watcher] = []

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Reading[Any], StepFacts, bool]:
        """Return the batch, ready to run, what ranks agree on, and whether the model has other members; collective.

        It is read once more where what was found does not hold for all rows together. An error on one rank is raised
        on all.
        """
        shared = self._settings.shared
        read = partial(self._execution.read, args, kwargs, self._model.training, shared=shared)
        batch, facts, changed = self._agree_on(read, of_own_rows=True)
        if facts.is_asked_alone:
            return batch, facts, False
        rows = batch.facts.rows if shared else sum(facts.rows)
        if rows and not self._takes(batch, facts, rows):  # what has no rows is refused by what runs it
            batch, facts, changed = self._agree_on(partial(batch.of_rows, rows), of_own_rows=False)
        return *self._filled(batch, facts), changed

    def _takes(self, batch: Reading[Any], facts: StepFacts, rows: int) -> bool:
        """Tell whether what ranks have found is one, and holds for all rows together; alike on all ranks."""
        if facts.has_unlike_graphs:
            return False
        takes = batch.takes(rows)
        return not any_rank(self._table, [not takes])[0] if facts.asks_rows else takes

    def _agree_on(self, read: Callable[[], Reading[Any]], *, of_own_rows: bool) -> tuple[Reading[Any], StepFacts, bool]:
        """Return the batch, what ranks agree on, and whether the script has made others of the model's members."""
        batch: Reading[Any] | None = None
        local: LocalFacts | Exception
        told: dict[str, float] = {"asks": not torch.is_grad_enabled()}
        try:
            batch = read()
            told |= {**self._own_seconds(), **self._writes.told}
            same = partial(batch.same_inputs, shared=self._settings.shared)
            told["inputs"] = self._same_inputs.told(batch.facts.shown, same)
            for watcher in tuple(self.watchers):
                told.update(watcher.tell())
            changed = self._members.look(self._execution.structure)
            count = self._members.count  # which all ranks must have alike
            told_of = f"{batch.facts.signature}, other members {count} times"
            local = replace(batch.facts, signature=told_of) if count else batch.facts
        except Exception as error:  # whatever it is, the others must not wait for this rank
            local = error
        facts = agree(self._table, local, told, takes_unlike_graphs=of_own_rows)
        assert batch is not None
        if not facts.is_asked_alone:
            self._writes.check(facts)
        return batch, facts, changed

    def _filled(self, batch: Reading[Any], facts: StepFacts) -> tuple[Reading[Any], StepFacts]:
        """Return what ranks have agreed on, filled up to the sizes of all; collective."""
        shared = self._settings.shared
        self._same_inputs.check(facts, batch.facts.shown, partial(batch.same_inputs, shared=shared))
        if shared:
            facts = replace(facts, counts=batch.facts.counts)
        fill = partial(batch.filled, facts, self._settings.outputs)
        if facts.unequal_sizes:  # ranks may have found unlike programs for theirs, of which one does not hold for all
            batch = raise_on_all_ranks(self._table, fill)
        elif facts.sizes != batch.facts.sizes:
            batch = fill()
        return batch, facts
