"""Which rows each rank brings and which each micro-batch takes; rows on their way there, outputs on their way back.

The global batch is the concatenation of the ranks' rows in rank order; pipelines take consecutive intervals of it,
micro-batches consecutive intervals of their pipeline's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Duplicate, Partial, Sharding, Split
from hetu_fx.base.device_types import HOST
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.fixed_messages import FixedMessages
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import BatchError
from hetu_fx.graph.row_dims import RowDims, slice_rows, with_rows
from hetu_fx.plans.plan import Plan, split_rows


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where rows come from and go to in one step.

    Attributes:
        owned: the rows that each rank brings, by number in the global batch.
        pipelines: the rows of each pipeline.
        micro_batches: for each pipeline, the rows of its micro-batches (some may be empty).
        repeats: each of several pipelines takes all rows, and makes the same of them.
        others: how many rows more the batch has, which other parts of the step run.
    """

    owned: tuple[range, ...]
    pipelines: tuple[range, ...]
    micro_batches: tuple[tuple[range, ...], ...]
    repeats: bool = False
    others: int = 0

    @property
    def total(self) -> int:
        """Return the number of rows of the global batch, or of what this part of the step runs of it."""
        return self.pipelines[-1].stop


def check_rows(owned_rows: tuple[int, ...], *, shared: bool) -> None:
    """Raise BatchError if there are no rows, or not the same number on ranks that bring the same."""
    if shared and len(set(owned_rows)) > 1:
        raise BatchError(
            f"data='global' means the same batch on every rank, but the ranks bring {list(owned_rows)} rows\n"
            f"hint: use data='per_rank' if each rank has rows of its own"
        )
    if sum(owned_rows) == 0:
        raise BatchError("the batch has no rows on any rank")


def plan_rows(plan: Plan, owned_rows: tuple[int, ...], *, shared: bool, repeats: bool = False) -> RowPlan:
    """Return the row plan of a step.

    Args:
        plan: says the pipelines' shares and micro-batches.
        owned_rows: rows that each rank brings.
        shared: all ranks bring the same rows (`data="global"`).
        repeats: each pipeline takes all rows, in one micro-batch, whatever its share.
    """
    total = owned_rows[0] if shared else sum(owned_rows)
    owned = tuple(range(0, total) for _ in owned_rows) if shared else _intervals(0, owned_rows)
    if repeats:
        each = tuple(range(0, total) for _ in plan.pipelines)
        return RowPlan(owned, each, tuple((rows,) for rows in each), repeats=len(each) > 1)
    split = split_rows(total, plan)
    pipelines = _intervals(0, tuple(map(sum, split)))
    micro = tuple(_intervals(p.start, rows) for p, rows in zip(pipelines, split, strict=True))
    return RowPlan(owned, pipelines, micro)


def _intervals(start: int, sizes: tuple[int, ...]) -> tuple[range, ...]:
    stops = [start + stop for stop in accumulate(sizes)]
    return tuple(range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True))


Readers = Mapping[str, frozenset[int]]
"""The ranks that read each input."""

# The shape of all rows, and the dim that counts them; None: all ranks read it.
Layout = tuple[tuple[int, ...], int, torch.dtype, frozenset[int] | None]


def rows_for_pipeline(
    tensors: Mapping[str, Tensor],
    row_dims: RowDims,
    rows: RowPlan,
    plan: Plan,
    table: GroupTable,
    *,
    shared: bool,
    readers: Readers | None = None,
) -> dict[str, Tensor]:
    """Return this rank's pipeline's rows of every per-row tensor; nothing for a rank outside the plan.

    Collective, unless `shared`: then every rank has all rows already, as one alone has. Otherwise a rank gets nothing
    of what it does not read, if `readers` are known.
    """
    if shared or table.size == 1:
        place = plan.place(table.rank)
        return {} if place is None else cut_rows(tensors, row_dims, rows.pipelines[place[0]])
    if readers is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if readers.get(name)}
    layouts = tuple(
        (with_rows(tuple(tensor.shape), dim, rows.total), dim, tensor.dtype, readers and readers[name])
        for name, tensor, dim in ((name, tensor, row_dims[name]) for name, tensor in tensors.items())
    )
    device = next((tensor.device for tensor in tensors.values()), HOST)
    moved = _row_messages(rows, plan, layouts, table.rank, device).run(table, list(tensors.values()))
    return {name: tensor for name, tensor in zip(tensors, moved, strict=True) if tensor is not None}


def cut_rows(tensors: Mapping[str, Tensor], row_dims: RowDims, interval: range) -> dict[str, Tensor]:
    """Return the rows of an interval, of inputs that have rows."""
    return {name: slice_rows(tensor, row_dims[name], interval) for name, tensor in tensors.items()}


@lru_cache(maxsize=256)
def _row_messages(
    rows: RowPlan, plan: Plan, layouts: tuple[Layout, ...], rank: int, device: torch.device
) -> FixedMessages:
    """Return what moves per-row tensors from the ranks that bring them to those of each pipeline that read them."""
    moves = [
        TensorMove(at_ranks(rows, dim, shared=False), at_readers(plan, readers, dim, rows), shape, dtype.itemsize)
        for shape, dim, dtype, readers in layouts
    ]
    return FixedMessages(plan_moves(moves), rank, [dtype for *_, dtype, _ in layouts], device)


def at_readers(plan: Plan, readers: frozenset[int] | None, rows_dim: int, rows: RowPlan) -> Annotation:
    """Return where a per-row tensor lies: on each pipeline's devices that read it, or on all where none does."""
    everyone = [pipeline.devices for pipeline in plan.pipelines]
    groups = [tuple(d for d in devices if readers is None or d in readers) or devices for devices in everyone]
    return at_pipelines(groups, [Sharding((Duplicate(len(group)),)) for group in groups], rows_dim, rows)


def at_pipelines(
    groups: Sequence[Sequence[int]],
    shardings: Sequence[Sharding],
    rows_dim: int | None,
    rows: RowPlan,
    *,
    summed: bool = False,
) -> Annotation:
    """Return where a tensor lies as pipelines read it, or an output after they have run.

    That is by rows over the pipelines; as summands of a sum over rows; as copies where each takes all rows; or, if rows
    do not matter, on the first pipeline that had some.
    """
    if rows.repeats:
        devices = tuple(DeviceGroup(tuple(group)) for group in groups)
        return Annotation(devices, tuple(shardings), Duplicate(len(groups)))
    if len(groups) == 1 or (rows_dim is None and not summed):
        first = next(i for i, interval in enumerate(rows.pipelines) if len(interval))
        return Annotation((DeviceGroup(tuple(groups[first])),), (shardings[first],))
    devices = tuple(DeviceGroup(tuple(group)) for group in groups)
    top = Partial(len(groups)) if rows_dim is None else Split(rows_dim, tuple(map(len, rows.pipelines)))
    return Annotation(devices, tuple(shardings), top)


def at_ranks(rows: RowPlan, rows_dim: int | None, *, shared: bool) -> Annotation:
    """Return where a tensor lies as ranks bring it, or want it: each rank's own rows, or all of it on every rank."""
    world = len(rows.owned)
    if world == 1:
        return Annotation.on((0,))
    if shared or rows_dim is None:
        return Annotation.on(tuple(range(world)), Duplicate(world))
    return Annotation.on(tuple(range(world)), Split(rows_dim, tuple(map(len, rows.owned))))


@lru_cache(maxsize=256)
def _one_move(source: Annotation, target: Annotation, shape: tuple[int, ...], itemsize: int) -> BsrPlan:
    """Return the plan that moves one tensor."""
    return plan_moves([TensorMove(source, target, shape, itemsize)])


def move_tensor(
    tensor: Tensor | None,
    source: Annotation,
    target: Annotation,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    table: GroupTable,
) -> Tensor | None:
    """Move one tensor; collective. `tensor` is this rank's piece, None where it has none."""
    like = [torch.empty(0, dtype=dtype)]
    return run_moves(_one_move(source, target, shape, dtype.itemsize), [tensor], table, like=like)[0]
