"""Messages of a batched send-receive whose sizes are all known: what goes where is found out once, not per message.

A stage of a pipeline sends the same slices in every micro-batch. Where a message is one slice, the tensor itself is
sent, and what arrives is the result: nothing is packed or copied. Otherwise slices stand in flat bytes, as `packing`
says, and a result that arrives whole is a view of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetu_fx.annotations.local import take_slice, write
from hetu_fx.annotations.region import Intervals, length
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, SliceTransfer
from hetu_fx.comm_ops.wire.flat import dense
from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.p2p import Tag, post
from hetu_fx.comm_ops.wire.packing import local_dims, packed_bytes, view_message
from hetu_fx.errors import CommError


@dataclass(frozen=True, slots=True)
class _Slice:
    """A slice of a message: of which move, where in the message, and where in this rank's tensor (None: all of it)."""

    move: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: tuple[Intervals | None, ...] | None
    adds: bool

    def of(self, message: Tensor) -> Tensor:
        """View the slice in flat bytes."""
        return view_message(message, self.offset, self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class _Result:
    """What this rank holds of a move after it, if not nothing; `starts_at_zero`: it is a summand that gets nothing."""

    shape: tuple[int, ...]
    starts_at_zero: bool


class FixedMessages:
    """One rank's side of one round of a plan.

    Args:
        plan: the round; no dim of its moves is symbolic.
        rank: this one.
        dtypes: of the moves.
        device: where tensors and messages stand.

    Raises:
        CommError: a size is not known.
    """

    def __init__(self, plan: BsrPlan, rank: int, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self._plan, self._rank, self._dtypes, self._device = plan, rank, tuple(dtypes), device
        self._check()
        incoming, leaving = plan.incoming.get(rank, ()), plan.outgoing.get(rank, {})
        senders = sorted({transfer.sender for transfer in incoming})
        self._leaving = {peer: self._slices(leaving[peer], sends=True) for peer in sorted(leaving)}
        into = {sender: self._slices([t for t in incoming if t.sender == sender], sends=False) for sender in senders}
        self._arriving = {sender: slices for sender, slices in into.items() if sender != rank}
        own = self._slices([t for t in incoming if t.sender == rank], sends=True)
        self._own = dict(zip(into.get(rank, ()), own, strict=True))
        self._results = [self._result(number) for number in range(len(plan.moves))]
        self._stay = [number for number, move in enumerate(plan.moves) if move.stays(rank)]
        parts = {sender: iter(slices) for sender, slices in into.items()}
        # In the order of the plan, in which summands are added.
        puts = [(transfer.sender, next(parts[transfer.sender])) for transfer in incoming]
        self._puts = [(sender, part) for sender, part in puts if part.move not in self._stay]
        counts = Counter(part.move for _, part in self._puts)
        whole = {p.move for _, p in self._puts if counts[p.move] == 1 and p.where is None and not p.adds}
        self._given = whole.union(self._stay)

    def leaving(self, pieces: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Return this rank's messages by receiver; they may be the pieces themselves."""
        return {peer: self._message(slices, pieces) for peer, slices in self._leaving.items()}

    def room(self) -> dict[int, Tensor]:
        """Make room for the messages to this rank, by sender."""
        return {sender: self._room(slices) for sender, slices in self._arriving.items()}

    def results(self, messages: Mapping[int, Tensor], pieces: Sequence[Tensor | None] = ()) -> list[Tensor | None]:
        """Return what this rank holds of each move, from the messages by sender and its own pieces.

        It may share their memory; where this rank's part stays as it is, it is the piece itself.
        """
        made: list[Tensor | None] = [None] * len(self._results)
        for number in self._stay:
            made[number] = pieces[number]
        for number, result in enumerate(self._results):
            if result is not None and number not in self._given:
                fill = torch.zeros if result.starts_at_zero else torch.empty
                made[number] = fill(result.shape, dtype=self._dtypes[number], device=self._device)
        for sender, part in self._puts:
            value, room = self._value(sender, part, messages, pieces), made[part.move]
            if room is None:
                made[part.move] = value
            else:
                write(room, part.where or (), value, adds=part.adds)
        return made

    def run(self, table: GroupTable, pieces: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Send and receive rows at once; return the results. Raises CommError where a peer is dead or late."""
        room, leaving = self.room(), self.leaving(pieces)
        peers = sorted({*room, *leaving})
        if peers:
            with guarded("batched send-receive", [self._rank, *peers], table):
                receives, sends = ([(peer, x, Tag.ROWS) for peer, x in by.items()] for by in (room, leaving))
                post(receives, sends, table).wait()
        return self.results(room, pieces)

    def _value(
        self, sender: int, part: _Slice, messages: Mapping[int, Tensor], pieces: Sequence[Tensor | None]
    ) -> Tensor:
        if sender == self._rank:
            return _cut(self._own[part], pieces)
        message = messages[sender]
        return message if len(self._arriving[sender]) == 1 else part.of(message)

    def _check(self) -> None:
        if any(size is None for move in self._plan.moves for size in move.shape):
            raise CommError(f"sizes are not all known: {[move.shape for move in self._plan.moves]}")

    def _slices(self, transfers: Sequence[SliceTransfer], *, sends: bool) -> tuple[_Slice, ...]:
        made, offset = [], 0
        for transfer in transfers:
            move, dtype = self._plan.moves[transfer.move], self._dtypes[transfer.move]
            annotation = move.source if sends else move.target
            where = local_dims(annotation, self._rank, move.shape, transfer.dims)
            shape = tuple(length(intervals) for intervals in transfer.dims)
            local = annotation.local_shape(self._rank, move.shape)
            is_all = where == tuple(((0, size),) for size in local)
            made.append(_Slice(transfer.move, offset, shape, dtype, None if is_all else where, transfer.adds))
            offset += packed_bytes(shape, dtype.itemsize)
        return tuple(made)

    def _result(self, number: int) -> _Result | None:
        move = self._plan.moves[number]
        if not move.target.holds(self._rank):
            return None
        shape = tuple(size or 0 for size in move.target.local_shape(self._rank, move.shape))
        return _Result(shape, bool(move.target.region(self._rank, move.shape).summand))

    def _message(self, slices: Sequence[_Slice], pieces: Sequence[Tensor | None]) -> Tensor:
        if len(slices) == 1:
            return dense(_cut(slices[0], pieces))
        message = torch.empty(_bytes(slices), dtype=torch.uint8, device=self._device)
        for part in slices:
            part.of(message).copy_(_cut(part, pieces))
        return message

    def _room(self, slices: Sequence[_Slice]) -> Tensor:
        if len(slices) == 1:
            return torch.empty(slices[0].shape, dtype=slices[0].dtype, device=self._device)
        return torch.empty(_bytes(slices), dtype=torch.uint8, device=self._device)


def _cut(part: _Slice, pieces: Sequence[Tensor | None]) -> Tensor:
    piece = pieces[part.move]
    if piece is None:
        raise CommError(f"a rank must send part of move {part.move}, but got no tensor for it")
    return piece if part.where is None else take_slice(piece, part.where)


def _bytes(slices: Sequence[_Slice]) -> int:
    last = slices[-1]
    return last.offset + math.prod(last.shape) * last.dtype.itemsize
