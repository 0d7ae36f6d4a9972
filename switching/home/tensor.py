"""HomeTensor: the optimizer's view of a parameter (or of its gradient, or of optimizer state).

A wrapper with the global shape around the dense piece that this rank owns. What an op does to it stands in OPS, filled
by `pointwise` (acts on the pieces), `ops` (one value over all ranks) and `gathered` (all the rest: gathered, run whole,
cut again). Import it from `hetu_fx.switching.home.ops`, which fills the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import add, attrgetter, sub
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hetu_fx.annotations.local import index
from hetu_fx.base.patches import install_patches
from hetu_fx.base.torch_private import (
    disabled_torch_function,
    increment_version,
    is_parameter,
    make_wrapper_subclass,
    mark_parameter,
    schema,
    set_versions,
    version,
)
from hetu_fx.comm_ops.wire.collectives import FlatCollectives
from hetu_fx.comm_ops.wire.groups import active
from hetu_fx.errors import StateError
from hetu_fx.switching.home.journal import journal
from hetu_fx.switching.home.layout import Chunk, HomeLayout
from hetu_fx.switching.home.memory import LazyFullTensor

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


Read = tuple[Any, Sequence[Any] | None]
"""What one rank asks another for, as JSON: an expression of parameters, and the number that it is read as, by a name of
`ops.PARTS` and its arguments; None: all elements. An expression is (key, writes, layout), or (op, expressions...)."""


MADE_OF = "made_of"
"""At a tensor that is none of the run's: the version of its piece, and what it is in parameters of a run."""


class ReadRun(Protocol):
    """Home tensors of which ranks read numbers alone; see `shared.SharedHomes`."""

    def whole(self, home: HomeTensor, of: Any) -> torch.Tensor: ...
    def keep(self, read: Read, part: torch.Tensor) -> None: ...
    def parts(self, reads: Sequence[Read], own: torch.Tensor) -> torch.Tensor: ...


class LoneReads:
    """What one rank alone may read of home tensors: nothing, before there is a run; see `shared`."""

    def whole(self, home: HomeTensor) -> torch.Tensor:
        """Return the whole of a tensor."""
        return gather_whole([home])[0]

    def expression(self, home: HomeTensor) -> tuple[ReadRun, Any] | None:
        """Return what a tensor is, in parameters of a run; None where all ranks must ask."""
        return None

    def note_made(self, made: HomeTensor, op: Any, args: Sequence[Any]) -> None:
        """Remember what a new tensor was computed of."""


class OpTable(dict[Any, Handler]):
    """What serves each op on home tensors; one that has no entry is looked for once.

    Attributes:
        find: tells what serves an op without an entry; given by `ops`.
        reads: what one rank alone may ask for; given by `shared`.
    """

    find: Callable[[Any], Handler]
    reads = LoneReads()

    def __missing__(self, func: Any) -> Handler:
        self[func] = found = counting_writes(func, self.find(func))
        return found


OPS = OpTable()


class HomeTensor(LazyFullTensor):
    """A tensor of global shape of which this rank owns `local`, as `home_layout` says.

    Point-wise ops and optimizer kernels act on the piece. Sums, means, dots and norms give the global value
    on every rank. Anything else gathers the tensor, runs whole, and is cut again where the result has the
    global shape. Reductions and whole ops talk to the other ranks: every rank must make the same calls in
    the same order.
    """

    local: torch.Tensor
    home_layout: HomeLayout
    wait_for_piece: Callable[[], None]  # there as long as `local` and `home_layout` are not: see `migrate.in_flight`

    # The default re-wraps every result in the subclass without its fields; the dispatcher does all we need.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: HomeLayout, requires_grad: bool = False) -> HomeTensor:
        """Wrap `local` (of `layout.local_shape`; shared, not copied). Raises StateError on another shape."""
        if local.shape != layout.local_shape:
            raise StateError(
                f"rank {layout.rank} owns a piece of shape {tuple(layout.local_shape)} of a tensor of shape "
                f"{layout.shape} under {layout.annotation}, got a piece of shape {tuple(local.shape)}"
            )
        install_patches("torch")
        return wrap(local.detach(), layout, requires_grad)

    @classmethod
    def from_full(cls, full: torch.Tensor, layout: HomeLayout, requires_grad: bool = False) -> HomeTensor:
        """Cut this rank's piece (a copy) out of the whole tensor. Raises StateError on another shape."""
        if tuple(full.shape) != layout.shape:
            raise StateError(f"home tensor of shape {layout.shape} cannot be cut from {tuple(full.shape)}")
        piece = layout.take(full.detach())
        return HomeTensor(piece.clone(memory_format=torch.contiguous_format), layout, requires_grad)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op by its entry in OPS."""
        return OPS[func](func, args, kwargs or {})

    if not TYPE_CHECKING:  # or any name would pass as an attribute

        def __getattr__(self, name: str) -> Any:
            """Wait for the piece if it is on its way; called for attributes that are not there."""
            wait = self.__dict__.get("wait_for_piece") if name in ("local", "home_layout") else None
            if wait is not None:
                wait()
            if name in self.__dict__:  # another thread may have waited for it meanwhile
                return self.__dict__[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def to_local(self) -> torch.Tensor:
        """Give this rank's piece, sharing its memory (as DTensor.to_local does, without autograd)."""
        return self.local

    def full_tensor(self) -> torch.Tensor:
        """Gather the whole tensor on every rank. Collective: every rank must call it."""
        return gather_whole([self])[0]

    @property
    def data(self) -> torch.Tensor:
        """The tensor without autograd, sharing its piece; setting it swaps piece, layout and dtype."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise StateError(
                f"a home tensor of shape {tuple(self.shape)} cannot be given data of shape {tuple(value.shape)}; "
                f"change the model's sizes (resize_token_embeddings, say) before hetu_fx.auto_parallelize"
            )
        other = value if isinstance(value, HomeTensor) else HomeTensor.from_full(value, self.home_layout)
        _SET_DATA(self, other.detach())
        before = version(self.local)
        self.local, self.home_layout = other.local, other.home_layout
        journal().swaps += 1
        # The version of `local` never goes back, so that it tells of a swap as of any other write.
        after = max(before, version(self.local))
        set_versions((self.local,), (after,))
        mark_written([self])
        if self.home_layout.world > 1 and not isinstance(value, HomeTensor):
            journal().write_value(self.local, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the tensor and this rank's piece, without talking to other ranks."""
        title = "Parameter containing" if is_parameter(self) else "home tensor"
        if "local" not in self.__dict__:
            return f"{title}: of shape {tuple(self.shape)}, {self.dtype}, whose shard is not here yet"
        return f"{title}: of shape {tuple(self.shape)}, {self.home_layout.held_text} here\n{self.local!r}"

    def __format__(self, spec: str) -> str:
        return format(self.full_tensor() if spec else repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> HomeTensor:
        """Copy the piece; the layout is shared. Only leaves can be copied, as for every tensor."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise StateError("only home tensors that are leaves of autograd can be deep-copied; detach() first")
        copied = wrap(self.local.clone(), self.home_layout, self.requires_grad)
        journal().note_copy(self, self.local, copied.local, self.home_layout)
        memo[id(self)] = copied
        if is_parameter(self):
            mark_parameter(copied)
        elif self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    @property
    def shares_memory(self) -> bool:
        """Whether every rank owns the whole."""
        return self.home_layout.is_whole_everywhere

    def gathered(self) -> torch.Tensor:
        """Return a copy of the whole on this rank; the others need not ask too, but see `switching.home.shared`."""
        return OPS.reads.whole(self)

    # The protocol of torch.distributed.checkpoint (_checkpointable._Checkpointable).

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """List what this rank saves: the elements that it counts."""
        from torch.distributed.checkpoint import metadata, planner

        properties = metadata.TensorProperties(dtype=self.dtype)
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in _chunk_metadata(self.home_layout.counted_chunks)
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """List the chunks this rank wants: all that it owns."""
        return _chunk_metadata((*self.home_layout.counted_chunks, *self.home_layout.other_chunks))

    def __get_tensor_shard__(self, chunk_index: Any) -> torch.Tensor:
        """Give the view of the piece that starts at a global offset."""
        offset = tuple(chunk_index.offset or (0,) * len(self.home_layout.shape))
        for box, local in (*self.home_layout.counted_chunks, *self.home_layout.other_chunks):
            if tuple(start for start, _ in box.bounds) == offset:
                return self.local[index(local)]
        layout = self.home_layout
        raise StateError(f"rank {layout.rank} has no chunk at {offset} of {layout.annotation}")


local_of: Callable[[Any], torch.Tensor] = attrgetter("local")
"""Returns this rank's piece of a home tensor."""
home_layout_of: Callable[[Any], HomeLayout] = attrgetter("home_layout")
"""Returns the layout of a home tensor."""
_SET_DATA: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def wrap(local: torch.Tensor, layout: HomeLayout, requires_grad: bool = False) -> HomeTensor:
    """Wrap a piece that is known to fit its layout."""
    # Strides, offset and memory format are those of such a shape; by position, as names take longer than the rest.
    home: HomeTensor = make_wrapper_subclass(
        HomeTensor, layout.size, None, None, None, local.dtype, torch.strided, local.device, False, requires_grad
    )
    home.local = local
    home.home_layout = layout
    return home


def counting_writes(op: Any, handler: Handler) -> Handler:
    """Have a handler tell the journal that it writes, if it does."""
    if not schema(op).is_mutable:
        return handler

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        noted = journal()
        noted.begin_write(func)
        try:
            made = handler(func, args, kwargs)
        finally:
            noted.writing.pop()
        noted.write(args, kwargs)
        return made

    return run


class PiecesWritten:
    """Home tensors whose pieces kernels are given as plain tensors: from when this is made to its `end`.

    Args:
        lists: the home tensors.
        uncounted: how often kernels write all of them without counting it in versions.
    """

    def __init__(self, lists: Sequence[Sequence[HomeTensor]], uncounted: int = 0) -> None:
        journal().begin_write(self)
        self._homes, self._uncounted = lists, uncounted
        self.pieces = [list(map(local_of, homes)) for homes in lists]
        self._before = [list(map(version, pieces)) for pieces in self.pieces]

    def end(self, like: Mapping[int, int] | None = None) -> None:
        """Count what was written to pieces in the versions of their home tensors, as any other write.

        Args:
            like: positions that kernels were not given, each with one that was written as these would have been.
        """
        journal().writing.remove(self)
        if like:
            self._count_as_written(like)
        for homes, pieces, before in zip(self._homes, self.pieces, self._before, strict=True):
            for _ in range(self._uncounted):
                increment_version(pieces)
            counts = list(map(sub, map(version, pieces), before))
            if len(set(counts)) == 1:  # as kernels write whole lists
                for _ in range(counts[0]):
                    increment_version(homes)
            else:
                set_versions(tuple(homes), tuple(map(add, map(version, homes), counts)))

    def _count_as_written(self, like: Mapping[int, int]) -> None:
        """Count in pieces that kernels were not given what was written to others."""
        for pieces, before in zip(self.pieces, self._before, strict=True):
            by_count: dict[int, list[torch.Tensor]] = {}
            for position, other in like.items():
                by_count.setdefault(version(pieces[other]) - before[other], []).append(pieces[position])
            for count, tensors in by_count.items():
                for _ in range(count):
                    increment_version(tensors)


def make_awaited(
    like: torch.Tensor, wait: Callable[[], None], device: torch.device | None = None, *, requires_grad: bool = False
) -> HomeTensor:
    """Return a tensor like another one that has no piece yet: whoever reads it calls `wait`, which ends in `give`.

    It is to be on a `device`; None: where the other one is.
    """
    place = like.device if device is None else device
    made: HomeTensor = make_wrapper_subclass(
        HomeTensor, like.shape, dtype=like.dtype, device=place, requires_grad=requires_grad
    )
    made.wait_for_piece = wait
    return made


def has_piece(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has its values here and now: not a home tensor whose piece is awaited."""
    return not isinstance(tensor, HomeTensor) or "local" in vars(tensor)


def give(tensor: HomeTensor, local: torch.Tensor, layout: HomeLayout) -> None:
    """Give an awaited tensor its piece."""
    tensor.local, tensor.home_layout = local, layout
    del tensor.wait_for_piece
    mark_written([tensor])


def mark_written(homes: Sequence[HomeTensor]) -> None:
    """Count a write in the versions of home tensors and pieces: below autograd torch does not do it itself.

    So `home._version` and `home.local._version` change with every write, list kernels included.
    """
    increment_version([tensor for home in homes for tensor in (home, home.local)])


def gather_whole(homes: Sequence[HomeTensor]) -> list[torch.Tensor]:
    """Gather several whole tensors in one message per dtype; collective, all ranks alike.

    A tensor that every rank owns whole is not moved and comes back sharing its memory.
    """
    wholes = [home.local for home in homes]
    by_dtype: dict[torch.dtype, list[int]] = {}
    for position, home in enumerate(homes):
        if not home.home_layout.is_whole_everywhere:
            by_dtype.setdefault(home.dtype, []).append(position)
    for positions in by_dtype.values():
        gathered = _gather_flat([homes[position] for position in positions])
        for position, whole in zip(positions, gathered, strict=True):
            wholes[position] = whole
    return wholes


def _gather_flat(homes: Sequence[HomeTensor]) -> list[torch.Tensor]:
    rank, world = homes[0].home_layout.rank, homes[0].home_layout.world
    layouts = [home.home_layout.others for home in homes]
    sizes = [sum(box.numel for owner in layouts for box, _ in owner[r].counted_chunks) for r in range(world)]
    parts = (buffer := homes[0].local.new_empty(sum(sizes))).split(sizes)
    mine = [h.local[index(part)].reshape(-1) for h in homes for _, part in h.home_layout.counted_chunks]
    if mine:
        torch.cat(mine, out=parts[rank])
    FlatCollectives(range(world), active(), 0).gather(parts[rank], [(size,) for size in sizes], parts).wait()
    return _unpack(buffer, sizes, layouts)


def _unpack(
    buffer: torch.Tensor, sizes: Sequence[int], layouts: Sequence[tuple[HomeLayout, ...]]
) -> list[torch.Tensor]:
    wholes = [buffer.new_empty(owners[0].shape) for owners in layouts]
    position = 0
    for rank in range(len(sizes)):
        for whole, owners in zip(wholes, layouts, strict=True):
            for box, _ in owners[rank].counted_chunks:
                target = whole[index(box)]
                target.copy_(buffer[position : position + box.numel].view(target.shape))
                position += box.numel
    return wholes


def _chunk_metadata(chunks: Sequence[Chunk]) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(
            offsets=torch.Size([start for start, _ in box.bounds]),
            sizes=torch.Size([stop - start for start, stop in box.bounds]),
        )
        for box, _ in chunks
    ]


def cut_like(tensor: torch.Tensor, layout: HomeLayout) -> torch.Tensor:
    """Give the part of a tensor, home or plain, that stands beside the piece of `layout`.

    Scalars stay; what broadcasts is expanded first; a home tensor of another layout is gathered.
    """
    if type(tensor) is HomeTensor:
        if tensor.home_layout is layout or same_layout(tensor.home_layout, layout):
            return tensor.local
        tensor = gather_whole([tensor])[0]
    if not tensor.dim():
        return tensor
    return layout.take(tensor.expand(layout.shape))


def same_layout(first: HomeLayout, second: HomeLayout) -> bool:
    """Tell whether two layouts give every rank the same piece."""
    return first.annotation == second.annotation and first.shape == second.shape
