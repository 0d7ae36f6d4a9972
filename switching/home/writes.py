"""Writes of home parameters by the script: how many a rank has made, and of which values. Ranks that differ are told.

A rank keeps its part of what it writes. So what one writes alone (a state dict that only rank 0 loads), or ranks write
unlike (weights drawn from seeds of their own), would leave parameters of which each part is another one's. The same
holds for whole gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import sub
from typing import Any

from torch import nn

from hetu_fx.base.torch_private import version
from hetu_fx.comm_ops.wire.consensus import LocalFacts, StepFacts, agree, of_all
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.home.outside import OutsideGradients
from hetu_fx.switching.home.piece_copies import swaps
from hetu_fx.switching.home.values import Sign, noted, take_sign

_BITS = (1 << 48) - 1  # of a number that float64 carries exactly
_MOST_NAMED = 6


class Writes:
    """What this rank has written to home parameters since they were made.

    Args:
        table: the ranks, which all make this together.
        homes: the home parameters by name.
    """

    def __init__(self, table: GroupTable, homes: Mapping[str, nn.Parameter]) -> None:
        self.table, self._homes = table, homes
        self._noted = 0
        self._values: dict[str, Sign] = {}
        self._gradients: dict[str, Sign] = {}
        self._outside = OutsideGradients()
        self.begin()
        self._before = [0] * len(self._tensors)  # what was written to a copy before its first call counts

    def begin(self) -> None:
        """Count from now on, for what are the parameters now; all ranks together."""
        self._tensors = list(self._homes.values())
        self._before = list(map(version, self._tensors))
        self._watch()

    @property
    def told(self) -> Mapping[str, float]:
        """Return the facts that are the same on all ranks that have written the same."""
        if self._noted != noted():
            self._noted = noted()
            self._values.update(self._signs())
        if self._swaps != swaps():  # of dtypes, it may be: torch adds to gradients elsewhere then
            self._watch()
        for name, sign in self._outside.take().items():
            self._gradients[name] = self._gradients[name].plus(sign) if name in self._gradients else sign
        signs = [*self._values.values(), *self._gradients.values()]
        products = [sign.product * number for number, sign in enumerate(signs, 1)]
        return {"writes": _folded(self._counts), "values": math.fsum(products)}

    def compare(self, where: str) -> None:
        """Refuse unlike writes between steps, as `check` does; collective."""
        self.check(agree(self.table, LocalFacts(rows=0, signature=where, told=self.told)))

    def check(self, facts: StepFacts) -> None:
        """Refuse unlike writes, where ranks have told of some; collective then.

        Raises:
            StateError: on every rank; names the parameters and the ranks.
        """
        if len(set(facts.writes)) > 1 or len(set(facts.values)) > 1:
            counts = dict(zip(self._homes, self._counts, strict=True))
            told = of_all(self.table, (counts, self._values, self._gradients))
            counts_of_all, values_of_all, gradients_of_all = zip(*told, strict=True)
            _refuse_counts(counts_of_all)  # values stay: the other ranks may write the same later
            self._forget()
            _refuse_values(values_of_all)
            _refuse_gradients(gradients_of_all)
        self._forget()

    def _forget(self) -> None:
        self._values, self._gradients = {}, {}

    def _watch(self) -> None:
        self._swaps = swaps()
        if self.table.size > 1:  # alone, whole gradients are right
            self._outside.watch(self._homes)

    @property
    def _counts(self) -> Iterator[int]:
        return map(sub, map(version, self._tensors), self._before)

    def _signs(self) -> Iterator[tuple[str, Sign]]:
        for name, home in self._homes.items():
            sign = take_sign(vars(home).get("local"))
            if sign is not None:
                yield name, sign


def _folded(counts: Iterable[int]) -> float:
    return float(hash(tuple(counts)) & _BITS)  # of numbers alone: the same in every process


def _refuse_counts(ranks: Sequence[Mapping[str, int]]) -> None:
    unlike = [name for name in _names(ranks) if len({told.get(name) for told in ranks}) > 1]
    if unlike:
        raise StateError(
            f"{_told(unlike)} written unequally often by the processes: {_times(ranks, unlike[0])}. A process that "
            f"writes alone (load_state_dict, copy_, an initialisation) changes its own part of a parameter and no "
            f"other's; do it on all processes, with the same values (torch.load the file on each, or send it by "
            f"torch.distributed.broadcast_object_list), or before hetu_fx.auto_parallelize, which takes process 0's"
        )


def _refuse_values(ranks: Sequence[Mapping[str, Sign]]) -> None:
    unlike = _unlike(ranks)
    if unlike:
        raise StateError(
            f"{_told(unlike)} written with unlike values by the processes. Each keeps its own part of what it writes, "
            f"so that the whole would be what none of them meant; let all write the same: the same file, the same "
            f"torch.manual_seed before an initialisation, or what process 0 has, by "
            f"torch.distributed.broadcast_object_list"
        )


def _refuse_gradients(ranks: Sequence[Mapping[str, Sign]]) -> None:
    unlike = _unlike(ranks)
    if unlike:
        norms = ", ".join(f"{told[unlike[0]].norm:.4g}" if unlike[0] in told else "none" for told in ranks)
        raise StateError(
            f"{_shown(unlike)} had a gradient from outside of the model's own calls (of a submodule, or of the "
            f"parameter itself) that is unlike on the processes (of {unlike[0]!r} with norms {norms}, by rank): each "
            f"used its own rows there, and would keep its own part of another gradient. Compute it in the model's "
            f"forward, so that the model's call gives it; or from the same rows on all processes (those of "
            f"torch.distributed.all_gather, as a loss of all of them), as a penalty of weights is"
        )


def _unlike(ranks: Sequence[Mapping[str, Sign]]) -> list[str]:
    return [name for name in _names(ranks) if not _alike([told.get(name) for told in ranks])]


def _names(ranks: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    return dict.fromkeys(name for told in ranks for name in told)


def _alike(signs: Sequence[Sign | None]) -> bool:
    return all(sign is not None and signs[0] is not None and sign.is_like(signs[0]) for sign in signs)


def _told(names: Sequence[str]) -> str:
    return f"{_shown(names)} {'has' if len(names) == 1 else 'have'} been"


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"parameter{'s' * (len(names) > 1)} {shown}{more}"


def _times(ranks: Sequence[Mapping[str, int]], name: str) -> str:
    counts = [told.get(name, 0) - min(other.get(name, 0) for other in ranks) for told in ranks]
    most = [f"rank {rank}: {count} more" for rank, count in enumerate(counts) if count]
    return f"{name!r} {', '.join(most)} than the others"
