"""The plain module for a while: whole parameters on every rank that nothing inside has to fetch.

Entering is collective: ranks agree that all enter, that each has room, and gather what has changed since the last time.
Inside, the module's parameters are plain tensors and its forward is its own, so that a rank may run what it likes, or
nothing. The home parameters are put aside, not replaced: they are the same objects afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hetu_fx.base.torch_private import buffer_slots, not_saved, parameter_slots, version
from hetu_fx.cluster.host import memory_left
from hetu_fx.comm_ops.wire.consensus import LocalFacts, agree, all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import StateError
from hetu_fx.switching.home.ops import HomeTensor, gather_whole
from hetu_fx.switching.home.parameters import MESSAGE_BYTES, Buffers, few_at_a_time
from hetu_fx.switching.home.tensor import mark_written
from hetu_fx.switching.home.writes import Writes

Left = tuple[tuple[str, int], ...]
"""What is left of each limit on a rank's memory, by the name of what is limited."""


@dataclass(frozen=True)
class _Copy:
    """A whole parameter, of the home parameter as it was when this was made."""

    home: HomeTensor
    version: int
    whole: nn.Parameter

    @property
    def is_current(self) -> bool:
        return version(self.home) == self.version


class WholeModule:
    """A model that can be made the plain module for a while.

    Args:
        model: the user's.
        table: its ranks.
        buffers: of the model.
        writes: to its parameters.
        keeps_bytes: what copies may take on a rank between two entries.

    Attributes:
        is_open: it is the plain module now.
    """

    def __init__(self, model: nn.Module, table: GroupTable, buffers: Buffers, writes: Writes, keeps_bytes: int) -> None:
        self.model, self.table, self.buffers, self.writes, self.keeps_bytes = model, table, buffers, writes, keeps_bytes
        self.is_open = False
        self._copies: dict[int, _Copy] = {}

    def drop(self) -> None:
        """Free the copies that are kept between entries."""
        self._copies = {}

    @contextmanager
    def opened(self, *, alone: bool = False) -> Iterator[nn.Module]:
        """Make the model the plain module inside; entering is collective, unless it is that already.

        A rank that enters while the others go on to train enters alone: these wait for what it comes with next, and
        give their shards in threads.

        Args:
            alone: it is known that this rank does so.

        Raises:
            StateError: on every rank, where one has no room for all parameters. On leaving, on this rank: parameters
                or buffers have been written or replaced inside.
        """
        if self.is_open:
            yield self.model
            return
        with using(self.table), torch.inference_mode(False), torch.no_grad():
            stand_ins = self._enter_alone() if alone else self._enter()
        placed = _placed(self.model, stand_ins)
        self.is_open = True
        try:
            yield self.model
        finally:
            self.is_open = False
            replaced = [place for place in placed if place.is_replaced]
            written = [place for place in placed if not place.is_replaced and place.is_written]
            for place in placed:
                place.slots[place.name] = place.original
            self._leave({id(place.original): place.original for place in written})
        self._check([*replaced, *written] if self.table.size > 1 else replaced)

    def _enter(self) -> dict[int, Tensor]:
        """Agree with all ranks that all enter, and make what is missing.

        Returns what stands for parameters and buffers, by their identity; parameters that are whole share memory.
        """
        homes, moved, lacking = self._homes()
        lacks = bool(lacking)
        signature = "the entry of model.hetu.whole()"
        told = {**self.writes.told, "asks": 1.0}
        facts = agree(self.table, LocalFacts(rows=0, signature=signature, counts=(float(lacks),), told=told))
        if facts.is_asked_alone:
            return self._enter_alone()
        self.writes.check(facts)
        if facts.counts[0]:
            self._gather(moved)
        self.buffers.sync()
        return self._stand_ins(homes)

    def _homes(self) -> tuple[list[HomeTensor], list[HomeTensor], list[HomeTensor]]:
        """Return all parameters, those that are not whole on all ranks, and those of these without a copy."""
        homes = [parameter for parameter in map(_as_home, self.model.parameters()) if parameter is not None]
        moved = [home for home in homes if not home.home_layout.is_whole_everywhere]
        self._copies = {key: copy for key, copy in self._copies.items() if copy.is_current}
        return homes, moved, [home for home in moved if id(home) not in self._copies]

    def _enter_alone(self) -> dict[int, Tensor]:
        """Read what is missing from the others' threads; as `_enter`.

        Raises:
            StateError: on this rank: it has no room, or its buffers are not up to date.
        """
        if names := self.buffers.outdated:
            raise StateError(
                f"rank {self.table.rank} alone calls the model, and buffers {names} are up to date on the ranks that "
                f"have written them only\nhint: call the model, or enter model.hetu.whole(), on all ranks"
            )
        homes, _, lacking = self._homes()
        needed = sum(home.numel() * home.itemsize for home in lacking)
        if lacking:
            check_room([()] * self.table.rank + [memory_left(lacking[0].device)], needed)
        for home in lacking:
            self._copies[id(home)] = _Copy(home, version(home), _constant(home.gathered(), home))
        return self._stand_ins(homes)

    def _stand_ins(self, homes: Sequence[HomeTensor]) -> dict[int, Tensor]:
        wholes: dict[int, Tensor] = {id(home): self._whole(home) for home in homes}
        if self.table.size == 1:  # whatever is written is what all ranks have
            return wholes
        return wholes | {id(buffer): buffer.clone() for buffer in self.model.buffers()}

    def _whole(self, home: HomeTensor) -> nn.Parameter:
        kept = self._copies.get(id(home))
        return _constant(home.local, home) if kept is None else kept.whole

    def _gather(self, homes: Sequence[HomeTensor]) -> None:
        """Gather whole parameters, some at a time; collective."""
        self.drop()
        sizes = [home.numel() * home.itemsize for home in homes]
        check_room(
            all_gather_object(self.table, memory_left(homes[0].device)), sum(sizes) + min(sum(sizes), MESSAGE_BYTES)
        )
        for some in few_at_a_time(dict(enumerate(homes))):
            for home, whole in zip(some.values(), gather_whole(list(some.values())), strict=True):
                self._copies[id(home)] = _Copy(home, version(home), _constant(whole, home))

    def _leave(self, written: Mapping[int, Tensor]) -> None:
        """Free what is not to be kept: copies that were written, or all if they are too large."""
        for key, original in written.items():
            if self._copies.pop(key, None) is None and isinstance(original, HomeTensor):
                mark_written([original])  # the stand-in shares its memory
        if sum(copy.whole.numel() * copy.whole.itemsize for copy in self._copies.values()) > self.keeps_bytes:
            self.drop()

    def _check(self, changed: Sequence[_Place]) -> None:
        """Refuse what was changed inside, where it does not reach what all ranks have."""
        names = [place.full_name for place in changed if place.is_state]
        if names:
            raise StateError(
                f"{names} were written or replaced inside model.hetu.whole(), where each rank has copies of its own\n"
                f"hint: change parameters and train outside of it, on all ranks alike, and call model.eval() for "
                f"modules that write their running statistics"
            )


@dataclass(frozen=True)
class _Place:
    """A slot of a module, what stood in it, what stands in it meanwhile, and the version of that."""

    full_name: str
    slots: dict[str, Any]
    name: str
    original: Tensor
    stand_in: Tensor
    version: int
    is_state: bool

    @property
    def is_replaced(self) -> bool:
        return self.slots.get(self.name) is not self.stand_in

    @property
    def is_written(self) -> bool:
        return version(self.stand_in) != self.version


def _placed(model: nn.Module, stand_ins: Mapping[int, Tensor]) -> list[_Place]:
    """Put tensors in the places of those that they stand for."""
    found = []
    for prefix, module in model.named_modules():
        for slots in (parameter_slots(module), buffer_slots(module)):
            for name, tensor in slots.items():
                if id(tensor) not in stand_ins:
                    continue
                made, full = stand_ins[id(tensor)], f"{prefix}.{name}" if prefix else name
                is_state = name not in not_saved(module)
                found.append(_Place(full, slots, name, tensor, made, version(made), is_state))
    for place in found:
        place.slots[place.name] = place.stand_in
    return found


def _as_home(parameter: Tensor) -> HomeTensor | None:
    return parameter if type(parameter) is HomeTensor else None


def check_room(left: Sequence[Left], needed: int) -> None:
    """Refuse to make whole copies where a rank has no room for them; ranks share limits of one name.

    Args:
        left: by rank.
        needed: bytes that every rank needs.

    Raises:
        StateError: names the ranks and what is short.
    """
    sharers = [name for limits in left for name, _ in limits]
    short = [
        f"rank {rank} has {size} bytes left of {name!r}, which {sharers.count(name)} ranks share"
        for rank, limits in enumerate(left)
        for name, size in limits
        if size < needed * sharers.count(name)
    ]
    if short:
        raise StateError(
            f"model.hetu.whole() needs {needed} bytes on every rank for the whole parameters: {'; '.join(short)}\n"
            f"hint: free memory there, start fewer processes per machine, or call the parallel model itself, which "
            f"gathers less"
        )


def _constant(whole: Tensor, home: HomeTensor) -> nn.Parameter:
    """Return a whole parameter that takes part in autograd, but has no gradient of its own."""
    made = nn.Parameter(whole.detach(), requires_grad=home.requires_grad)
    if home.requires_grad:
        made.register_hook(_refuse_gradient)
    return made


def _refuse_gradient(gradient: Tensor) -> NoReturn:
    raise StateError(
        "a backward reached the parameters inside model.hetu.whole(), where they have no gradients\n"
        "hint: train outside of it, or take torch.autograd.grad(loss, inputs) for gradients of inputs alone"
    )
