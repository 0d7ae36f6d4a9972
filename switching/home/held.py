"""Tensors that ranks read of each other: under which keys, and what a rank holds of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetu_fx.annotations.local import index
from hetu_fx.base.torch_private import version
from hetu_fx.errors import StateError
from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.home.tensor import HomeTensor, undisturbed

_KEPT_READINGS = 3  # of one tensor beside the newest: so far ranks may be apart

JOINT = "read by all ranks"
COPIED = "copied after"

Key = tuple[str, ...]
"""A parameter's name; that, an optimizer's number and a key of its state; one of these, when it was copied and in which
dtype; or what tells readings by all ranks apart."""


@dataclass(frozen=True, slots=True)
class Readable:
    """A tensor that others may read.

    Attributes:
        counts: what counts its writes: a home tensor, or the piece of a copy.
        piece: this rank's part; None while that is on its way between homes.
        layout: says what part it is.
    """

    counts: torch.Tensor
    piece: torch.Tensor | None
    layout: HomeLayout | None

    @classmethod
    def home(cls, tensor: HomeTensor) -> Readable:
        """Return a home tensor as what it is now, without waiting for its piece."""
        return cls(tensor, tensor.__dict__.get("local"), tensor.__dict__.get("home_layout"))

    @property
    def writes(self) -> int:
        """How often it has been written."""
        return version(self.counts)

    def part(self, wanted: int, layout: str) -> torch.Tensor | None:
        """Return this rank's part after so many writes; None if it has another value, or none at the moment."""
        if self.writes != wanted or self.piece is None or self.layout is None:
            return None
        if str(self.layout.annotation) != layout:
            raise StateError(f"it lies as {self.layout.annotation} there, as {layout} where it is asked for")
        piece, own = self.piece, self.layout
        part = undisturbed(lambda: part_of(piece, own))
        return part if self.writes == wanted else None


class Readings:
    """This rank's parts of what it has read itself, for ranks that read it later, while this writes and reads on."""

    def __init__(self) -> None:
        self._kept: dict[Key, dict[int, torch.Tensor]] = {}

    def keep(self, key: Key, writes: int, part: torch.Tensor) -> None:
        """Keep a part, as it was after so many writes, and some of what was kept of the same tensor before."""
        before = list(self._kept.get(key, {}).items())
        self._kept[key] = dict([*before[-_KEPT_READINGS:], (writes, part)])  # another one: threads look it up

    def part(self, key: Key, writes: int) -> torch.Tensor | None:
        """Return what was read after so many writes; from any thread."""
        return self._kept.get(key, {}).get(writes)

    def clear(self) -> None:
        """Let go of all."""
        self._kept.clear()


def part_of(local: torch.Tensor, layout: HomeLayout) -> torch.Tensor:
    """Return the elements that this rank counts in host memory, in the order of its chunks."""
    pieces = [local[index(place)].reshape(-1) for _, place in layout.counted_chunks]
    return torch.cat(pieces).cpu() if pieces else local.new_empty(0, device="cpu")


def is_copy(key: Key) -> bool:
    """Tell whether a key is of a copy."""
    return COPIED in key[1:]


def source_of(key: Key) -> tuple[Key, int, torch.dtype]:
    """Return the key of what a copy was made of, after how many writes, and in which dtype."""
    *source, _, writes, dtype = key
    return tuple(source), int(writes), getattr(torch, dtype.removeprefix("torch."))


def why_not(key: Key, held: Sequence[Readable], question: Mapping[str, Any], seconds: float) -> str:
    """Return why a rank that asks is given nothing after so many seconds, and the way out."""
    asker, wanted = question["rank"], question["version"]
    way_out = "call full_tensor(), or model.hetu.save(folder), on every rank"
    if key[0] == JOINT:
        return (
            f"rank {asker} reads a tensor of shape {key[2]} that is neither a parameter nor an optimizer's state (a "
            f"gradient, a result), and this rank has not read it too within {seconds:g} s; {way_out}"
        )
    what = f"the optimizer's {key[2]!r} of {key[0]!r}" if len(key) in (3, 6) else f"parameter {key[0]!r}"
    what = f"a copy of {what}" if is_copy(key) else what
    writes = [one.writes for one in held]
    if not writes or len(writes) > 1:
        return f"rank {asker} reads {what}, of which there are {len(writes)} here after {seconds:g} s; {way_out}"
    if writes[0] > wanted:
        return (
            f"rank {asker} reads {what} as it was after {wanted} writes, and this rank has gone on and made "
            f"{writes[0]}; read between optimizer.step() and the next call of the model, or {way_out}"
        )
    return (
        f"rank {asker} reads {what} after {wanted} writes, and this rank has made {writes[0]} in {seconds:g} s; "
        f"make the same writes on all ranks, or {way_out}"
    )
