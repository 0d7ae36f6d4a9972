"""A thing that ranks must do alike between steps, and how what they have done unlike is told."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from hetu_fx.switching.home.values import Sign

_MOST_NAMED = 6
BY_ALL = (
    "do it on all processes, with the same values (torch.load the file on each, or send it by "
    "torch.distributed.broadcast_object_list)"
)
SAME = (
    "let all write the same: the same file, the same torch.manual_seed before an initialisation, or what process 0 "
    "has, by torch.distributed.broadcast_object_list"
)


class WriteWatch(Protocol):
    """One thing that ranks must do alike.

    Attributes:
        lasts: what was done unlike counts until the other ranks have done the same.
    """

    lasts: ClassVar[bool]

    @property
    def number(self) -> Hashable:
        """Return numbers, nested in tuples, that are the same on all ranks that have done the same."""

    @property
    def detail(self) -> Any:
        """Return what is to be told of it where ranks differ in anything."""

    def problem(self, told: Sequence[Any]) -> str:
        """Return what is unlike in the details of all ranks, and the way out; "" if nothing is."""

    def begin(self) -> None:
        """Take what the model consists of now for what it is."""

    def settle(self) -> None:
        """Begin anew, as all ranks have compared."""


def numbers_of(signs: Iterable[Sign]) -> Hashable:
    """Return numbers that tell signs from others."""
    return tuple((clean(sign.product), clean(sign.norm)) for sign in signs)


def clean(number: float) -> float:
    """Return a number that has the same hash in every process, which nan has not."""
    return 0.5 if math.isnan(number) else number  # whose hash is another one in each process


def unequally_counted(ranks: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names that ranks have counted unequally."""
    return [name for name in names_of(ranks) if len({told.get(name) for told in ranks}) > 1]


def unlike_signs(ranks: Sequence[Mapping[str, Sign]]) -> list[str]:
    """Return the names whose signs are unlike, or not on all ranks."""
    return [name for name in names_of(ranks) if not are_alike([told.get(name) for told in ranks])]


def names_of(ranks: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Return all names, each once."""
    return dict.fromkeys(name for told in ranks for name in told)


def are_alike(signs: Sequence[Sign | None]) -> bool:
    """Tell whether signs may be of one value."""
    return all(sign is not None and signs[0] is not None and sign.is_like(signs[0]) for sign in signs)


def were(names: Sequence[str], kind: str) -> str:
    """Begin to say what has been done to some things of a kind."""
    return f"{named(names, kind)} {'has' if len(names) == 1 else 'have'} been"


def named(names: Sequence[str], kind: str) -> str:
    """Name some things of a kind."""
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{kind}{'s' * (len(names) > 1)} {shown}{more}"


def times(ranks: Sequence[Mapping[str, int]], name: str) -> str:
    """Say how often ranks have done more than the others with one thing."""
    counts = [told.get(name, 0) - min(other.get(name, 0) for other in ranks) for told in ranks]
    most = [f"rank {rank}: {count} more" for rank, count in enumerate(counts) if count]
    return f"{name!r} {', '.join(most)} than the others"
