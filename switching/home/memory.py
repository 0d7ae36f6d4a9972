"""A tensor without memory of its own gives the memory of the whole to whoever asks: pickles, arrays, pointers.

`torch.save`, safetensors and numpy need memory. What they are given is gathered when they ask, and not before: a state
dict is made of references, as torch's own is. The whole that a pointer leads into stays as long as the tensor that was
asked, or until that is written; tensors that share a piece (the names of tied parameters) share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from weakref import ref

import torch

from hetu_fx.base.per_rank import own
from hetu_fx.base.torch_private import is_parameter, version
from hetu_fx.errors import StateError

_WHOLE = "whole"
"""At a piece: the version that a whole was gathered of, and a reference to that."""


@dataclass
class _Naming:
    """How many of a rank's blocks of `named_storages` it is in."""

    depth: int = 0


@contextmanager
def named_storages() -> Iterator[None]:
    """Within it, parallel models' tensors name their storages: nothing is gathered for whoever asks which are one.

    Savers ask that of all tensors before they write the first. What `untyped_storage()` returns then has `data_ptr()`
    and `nbytes()`, which tell storages apart, and no memory; the `data_ptr()` of a tensor is that of the whole as ever.
    """
    naming = own(_Naming)
    naming.depth += 1
    try:
        yield
    finally:
        naming.depth -= 1


@dataclass(frozen=True)
class StorageName:
    """Tells the storage that a whole tensor would have from others."""

    number: int
    num_bytes: int

    def data_ptr(self) -> int:
        """Return a number that no other storage has."""
        return self.number

    def nbytes(self) -> int:
        """Return the size of the whole tensor."""
        return self.num_bytes


class LazyFullTensor(torch.Tensor):
    """A tensor of which this rank has a piece only, to those who ask for memory: they get that of the whole."""

    local: torch.Tensor
    _kept: tuple[int, torch.Tensor]

    def gathered(self) -> torch.Tensor:
        """Return the whole tensor on this rank, without the others' taking part where that is possible."""
        raise NotImplementedError

    @property
    def shares_memory(self) -> bool:
        """Whether the whole is this rank's own piece, and so on every rank."""
        raise NotImplementedError

    def kept_whole(self) -> torch.Tensor | None:
        """Return the whole that this very tensor was asked for, if it has not been written since."""
        kept = self.__dict__.get("_kept")
        return kept[1] if kept is not None and kept[0] == version(self.local) else None

    def whole(self, *, keep: bool = False) -> torch.Tensor:
        """Return the whole tensor; `keep` it as long as this tensor lives and stays as it is."""
        if self.shares_memory:
            return self.local
        now = version(self.local)
        gathered_at, shared = vars(self.local).get(_WHOLE, (None, None))
        found = shared() if shared is not None and gathered_at == now else None
        if found is None:
            found = self.gathered()
            vars(self.local)[_WHOLE] = now, ref(found)
        if keep:
            self._kept = (now, found)
        return found

    def data_ptr(self) -> int:
        """Return the address of the whole tensor, which stays while this tensor lives and is not written."""
        return self.whole(keep=True).data_ptr()

    def untyped_storage(self) -> Any:
        """Return the memory of the whole tensor; writing to it is not writing to this one."""
        if own(_Naming).depth and not self.shares_memory:
            return StorageName(id(self.local), self.nbytes)
        return self.whole(keep=True).untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole tensor as an array: read-only where it is a copy."""
        array = self.whole().detach().requires_grad_(self.requires_grad).numpy(force=force)
        if not self.shares_memory:
            array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the whole tensor as nested lists."""
        return self.whole().tolist()

    def item(self) -> Any:
        """Return the only element."""
        return self.whole().item()

    def __float__(self) -> float:
        return float(self.whole())

    def __int__(self) -> int:
        return int(self.whole())

    def __dlpack__(self, **options: Any) -> Any:
        """Give the whole tensor to another library."""
        return self.whole(keep=True).__dlpack__(**options)

    def is_shared(self) -> bool:
        """Tell whether this rank's piece is in memory that processes share."""
        return bool(self.local.is_shared())

    def share_memory_(self) -> Self:
        """Share the memory with other processes where the whole is here. Raises StateError elsewhere."""
        if not self.shares_memory:
            raise StateError(
                f"a tensor of shape {tuple(self.shape)}, of which this rank holds a piece only, cannot be put into "
                f"memory that processes share; share a copy, made by full_tensor() on every rank"
            )
        self.local.share_memory_()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain tensor, or parameter, that it is in all."""
        plain = self.whole(keep=not is_parameter(self)).detach()
        if is_parameter(self):
            return torch.nn.Parameter(plain, self.requires_grad).__reduce_ex__(protocol)
        return plain.requires_grad_(self.requires_grad).__reduce_ex__(protocol)


def drop_cached_full_tensors(parameters: Iterable[torch.Tensor]) -> None:
    """Let go of the wholes that were kept for pointers into parameters: those live longer than any pointer is used."""
    for parameter in parameters:
        vars(parameter).pop("_kept", None)
