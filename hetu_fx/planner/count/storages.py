"""Storages seen to come and go: what tensors hold in memory, counted to the byte, for any device and without one.

Counts what ops return. Memory that a kernel takes for itself and gives back before it returns is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hetu_fx.base.torch_private import TorchDispatchMode, storage_key, tree_leaves

Owner = TypeVar("Owner")
"""What is noted as the owner of a storage."""


@dataclass(frozen=True, slots=True)
class Change(Generic[Owner]):
    """A storage that has been allocated, or freed (`bytes` below 0); `during` is whose turn it was then."""

    storage: int
    bytes: int
    owner: Owner
    during: Owner


class Storages(TorchDispatchMode, Generic[Owner]):
    """Inside its context, writes down every storage that an op makes, under the `owner` of the moment."""

    def __init__(self, owner: Owner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self._live: dict[int, tuple[int, int, Owner, Any]] = {}
        self._ignored: set[int] = set()
        self._log: list[Change[Owner]] = []
        self._serial = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors out, seen before or not."""
        self._ignored |= self.numbers(tensors)

    def numbers(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the numbers of the storages of these tensors."""
        return frozenset(self._see(tensor.untyped_storage()) for tensor in tensors)

    def changes(self) -> list[Change[Owner]]:
        """Return what has come and gone, in order, without what is ignored."""
        return [change for change in self._log if change.storage not in self._ignored]

    def _see(self, storage: torch.UntypedStorage) -> int:
        key = storage_key(storage)
        if key not in self._live:
            serial = self._serial = self._serial + 1
            ended = weakref.ref(storage, partial(self._gone, key))
            self._live[key] = (serial, storage.nbytes(), self.owner, ended)
            self._log.append(Change(serial, storage.nbytes(), self.owner, self.owner))
        return self._live[key][0]

    def _gone(self, key: int, ended: Any) -> None:
        serial, size, owner, mine = self._live[key]
        if mine is ended:
            del self._live[key]
            self._log.append(Change(serial, -size, owner, self.owner))
