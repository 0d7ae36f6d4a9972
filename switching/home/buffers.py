"""Buffers of the model: whole on every rank, each rank's own part of them up to date, the rest on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Duplicate
from hetu_fx.annotations.local import local_part, write_part
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.groups import GroupTable


class Buffers:
    """Reads and writes parts of a model's buffers.

    A stage that updates a buffer (running statistics) writes the part it has; `sync` makes all ranks' copies equal
    again and is needed before another layout reads them.
    """

    def __init__(self, model: nn.Module, table: GroupTable) -> None:
        self.model, self.table = model, table
        self._stale: dict[str, Annotation] = {}

    def read(self, name: str, annotation: Annotation) -> Tensor:
        """Return this rank's part of a buffer under `annotation`."""
        return local_part(self._buffer(name), annotation, self.table.rank)

    def write(self, updates: Mapping[str, Tensor], annotations: Mapping[str, Annotation]) -> None:
        """Write new values of this rank's parts; `annotations` says for all ranks where each buffer's parts lie."""
        for name, value in updates.items():
            write_part(self._buffer(name), value, annotations[name], self.table.rank)
        self._stale.update(annotations)

    def mark_written(self, names: Iterable[str], owner: int) -> None:
        """Remember buffers that each rank writes for itself; the values of rank `owner` will count."""
        self._stale.update(dict.fromkeys(names, Annotation.on((owner,))))

    def sync(self) -> None:
        """Bring every buffer that stages have written up to date on all ranks; collective."""
        stale, self._stale = self._stale, {}
        if self.table.size == 1 or not stale:
            return
        names = sorted(stale)
        everyone = tuple(range(self.table.size))
        whole = Annotation.on(everyone, Duplicate(len(everyone)))
        buffers = [self._buffer(name) for name in names]
        moves = [
            TensorMove(stale[name], whole, tuple(buffer.shape), buffer.element_size())
            for name, buffer in zip(names, buffers, strict=True)
        ]
        rank = self.table.rank
        parts = [
            local_part(buffer, stale[name], rank) if stale[name].holds(rank) else None
            for name, buffer in zip(names, buffers, strict=True)
        ]
        moved = run_moves(plan_moves(moves), parts, self.table, like=buffers)
        for buffer, fresh in zip(buffers, moved, strict=True):
            if fresh is not None:
                buffer.copy_(fresh)

    def _buffer(self, name: str) -> Tensor:
        return self.model.get_buffer(name)
