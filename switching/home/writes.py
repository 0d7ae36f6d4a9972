"""The script's writes to parameters, and to what belongs to them: alike on all ranks, or the ranks are told.

A rank keeps its part of what it writes. So what one writes alone (a state dict that only rank 0 loads), or ranks write
unlike (weights drawn from seeds of their own), would leave wholes of which each part is another one's. One fingerprint
of all that was written goes with what ranks agree on; why it differs is worked out only where it does.

Where a submodule or a parameter is used alone, outside of the model's own calls, a home parameter is whole, and so is
its gradient: of the rows that this rank used. Ranks that used other rows have unlike ones, of which each would keep its
part. Those that used the same (a penalty of weights) have the gradient of one device. Signs of gradients show which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import sub
from typing import Any, NamedTuple

from torch import nn
from torch.autograd.graph import get_gradient_edge

from hetu_fx.base.torch_private import version
from hetu_fx.comm_ops.wire.consensus import LocalFacts, StepFacts, agree, all_gather_object, hash_text
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.home.journal import SIGN, PendingSign, Rates, Sign, journal
from hetu_fx.switching.home.parameters import Buffers
from hetu_fx.switching.home.tensor import HomeTensor

_MOST_NAMED = 6
_BY_ALL = (
    "do it on all processes, with the same values (torch.load the file on each, or send it by "
    "torch.distributed.broadcast_object_list)"
)
_SAME = (
    "let all write the same: the same file, the same torch.manual_seed before an initialisation, or what process 0 "
    "has, by torch.distributed.broadcast_object_list"
)


class ScriptWrites(NamedTuple):
    """What a rank has written, by kind, in the order in which differences are told: by name first.

    Attributes:
        parameters: how often the script has written each, steps of optimizers included.
        buffers: how often; steps that write them do not count.
        parameter_values: the last whole plain value that was written to each.
        buffer_values: of those that were written.
        outside_gradients: the sum of those that each parameter had from outside of the model's calls.
        rates: the numbers that optimizers have gone by, step by step.
        tensors: how many gradients, states of optimizers and other home tensors.
        numbers: the numbers, and the values, that home tensors were written with.
    """

    parameters: Mapping[str, int]
    buffers: Mapping[str, int]
    parameter_values: Mapping[str, Sign]
    buffer_values: Mapping[str, Sign]
    outside_gradients: Mapping[str, Sign]
    rates: Sequence[Rates]
    tensors: int
    numbers: tuple[Sequence[float], Sequence[Sign]]


class Writes:
    """What this rank has written to home parameters, and to what belongs to them, since they were made.

    Args:
        table: the ranks, which all make this together. One alone compares nothing: what it writes is what all have.
        homes: the home parameters by name.
        buffers: of the model.
    """

    def __init__(self, table: GroupTable, homes: Mapping[str, nn.Parameter], buffers: Buffers) -> None:
        self.table, self._homes, self._buffers = table, homes, buffers
        self._gradients: dict[str, list[PendingSign]] = {}
        self._nodes: dict[str, Any] = {}
        self.begin()
        self._versions = [0] * len(self._parameters)  # what was written to a copy before its first call counts, and
        self._values_seen = 0  # its values
        self._marks = _marks()

    def begin(self) -> None:
        """Begin anew with what are the parameters and buffers now; all ranks together."""
        self._parameters = list(self._homes.values()) if self.table.size > 1 else []
        self._versions = list(map(version, self._parameters))
        self._buffers.look()
        self._buffers_begun = self._buffers_settled = self._buffers.script_writes()
        self._watch_gradients()

    @property
    def told(self) -> Mapping[str, float]:
        """Return the fact that is the same on all ranks that have written the same."""
        if self.table.size == 1:
            return {}
        parameters, *others = self.written
        return {"writes": float(hash_text(repr((*parameters.values(), others))))}  # whose names are not worth the time

    @property
    def written(self) -> ScriptWrites:
        """Return what is told to the others where it differs."""
        if self._swaps != journal().swaps:  # of dtypes, it may be: torch adds to gradients elsewhere then
            self._watch_gradients()
        noted, counts, (steps, tensors, numbers, values) = journal(), self._buffers.script_writes(), self._marks
        homes = self._homes.items() if noted.values.count != self._values_seen else ()
        signed = ((name, _at_piece(home).get(SIGN)) for name, home in homes)
        written = (name for name, count in counts.items() if count != self._buffers_settled[name])
        return ScriptWrites(
            dict(zip(self._homes, map(sub, map(version, self._parameters), self._versions), strict=True)),
            {name: count - self._buffers_begun[name] for name, count in counts.items()},
            {name: found.sign for name, found in signed if found is not None},
            {name: PendingSign.of(self._buffers.named(name)).sign for name in written},
            {name: reduce(Sign.plus, (one.sign for one in found)) for name, found in self._gradients.items()},
            noted.steps.since(steps),
            noted.tensors - tensors,
            (noted.numbers.since(numbers), [one.sign for one in noted.values.since(values)]),
        )

    def compare(self, where: str) -> None:
        """Refuse unlike writes between steps, as `check` does; collective."""
        self.check(agree(self.table, LocalFacts(rows=0, signature=where, told=self.told)))

    def check(self, facts: StepFacts) -> None:
        """Refuse unlike writes, where ranks have told of some; collective then.

        Raises:
            StateError: on every rank; names what was written unlike, and the way out.
        """
        if self.table.size == 1:
            return
        if len(set(facts.writes)) > 1:
            for kind, told in zip(
                _COMPARISONS, zip(*all_gather_object(self.table, tuple(self.written)), strict=True), strict=True
            ):
                if problem := kind.problem(told):
                    if not kind.lasts:
                        self._settle()
                    raise StateError(problem)
        self._settle()

    def _settle(self) -> None:
        """Begin to note anew, as all ranks have compared; totals go on."""
        self._marks = _marks()
        if self._marks[-1] != self._values_seen:
            self._values_seen = self._marks[-1]
            for home in self._homes.values():
                _at_piece(home).pop(SIGN, None)
        self._buffers_settled = self._buffers.script_writes()
        self._gradients.clear()
        journal().next_round()

    def _watch_gradients(self) -> None:
        """Note the whole gradients that are added to those of the parameters from now on; each is watched once."""
        self._swaps = journal().swaps
        homes = self._homes.items() if self.table.size > 1 else ()
        nodes = {name: get_gradient_edge(home).node for name, home in homes if home.requires_grad}
        for name, node in nodes.items():
            if node is not self._nodes.get(name):
                node.register_prehook(partial(self._see, name))
        self._nodes = nodes

    def _see(self, name: str, gradients: tuple[Any, ...]) -> None:
        for gradient in gradients:
            if gradient is not None and not isinstance(gradient, HomeTensor):
                self._gradients.setdefault(name, []).append(PendingSign.of(gradient))


def _marks() -> tuple[int, int, int, int]:
    """Return how much the journal has of each thing now."""
    noted = journal()
    return noted.steps.count, noted.tensors, noted.numbers.count, noted.values.count


def _at_piece(home: nn.Parameter) -> dict[str, Any]:
    """Return what stands at this rank's piece of a parameter; nothing while that is on its way."""
    piece = vars(home).get("local")
    return {} if piece is None else vars(piece)


def _unequally_often(kind: str, way_out: str, told: Sequence[Mapping[str, int]]) -> str:
    """Name what was written unequally often, and how often ranks have written the first more than the others."""
    unlike = [name for name in _names(told) if len({one.get(name) for one in told}) > 1]
    if not unlike:
        return ""
    counts = [one.get(unlike[0], 0) for one in told]
    more = [f"rank {rank}: {count - min(counts)} more" for rank, count in enumerate(counts) if count > min(counts)]
    shown = f"{unlike[0]!r} {', '.join(more)} than the others"
    return f"{_were(unlike, kind)} written unequally often by the processes: {shown}. {way_out}"


def _unlike_values(kind: str, way_out: str, told: Sequence[Mapping[str, Sign]]) -> str:
    unlike = _unlike(told)
    return f"{_were(unlike, kind)} written with unlike values by the processes{way_out}" if unlike else ""


def _unlike_gradients(told: Sequence[Mapping[str, Sign]]) -> str:
    unlike = _unlike(told)
    if not unlike:
        return ""
    norms = ", ".join(f"{one[unlike[0]].norm:.4g}" if unlike[0] in one else "none" for one in told)
    return (
        f"{_named(unlike, 'parameter')} had a gradient from outside of the model's own calls (of a submodule, or "
        f"of the parameter itself) that is unlike on the processes (of {unlike[0]!r} with norms {norms}, by rank): "
        f"each used its own rows there, and would keep its own part of another gradient. Compute it in the model's "
        f"forward, so that the model's call gives it; or from the same rows on all processes (those of "
        f"torch.distributed.all_gather, as a loss of all of them), as a penalty of weights is"
    )


def _unlike_rates(told: Sequence[Sequence[Rates]]) -> str:
    """Name the first number that is unlike."""
    groups = (of_group for of_step in zip(*told, strict=False) for of_group in zip(*of_step, strict=False))
    for options in (list(map(dict, of_group)) for of_group in groups):
        for name in _names(options):
            if len({str(one.get(name)) for one in options}) > 1:
                shown = [", ".join(f"{number:g}" for number in one.get(name, ())) for one in options]
                by_rank = ", ".join(f"{numbers} on rank {rank}" for rank, numbers in enumerate(shown))
                return (
                    f"the processes have stepped an optimizer with unlike {name!r}: {by_rank}. Each would update its "
                    f"own part of the parameters in its own way; set it on all processes alike, and step schedules on "
                    f"all of them, by a value that all have (a loss of all rows, as the model's call returns it, or "
                    f"what process 0 has, by torch.distributed.broadcast_object_list)"
                )
    return ""


def _unlike_counts(told: Sequence[int]) -> str:
    if len(set(told)) == 1:
        return ""
    return (
        f"the processes have written unequally many gradients, states of optimizers or copies of parameters since the "
        f"last call: {', '.join(map(str, told))} tensors, by rank. Each has its own part of them, so what one writes "
        f"alone (scales or clips gradients, sets them to zero, resets a momentum, keeps an average) changes this part "
        f"alone; do it on all processes"
    )


def _unlike_numbers(told: Sequence[tuple[Sequence[float], Sequence[Sign]]]) -> str:
    """Show the first number, else the first value, that is unlike."""
    numbers, signs = (zip(*of_ranks, strict=False) for of_ranks in zip(*told, strict=True))
    unlike = (f"the numbers {', '.join(f'{one:g}' for one in of)}" for of in numbers if not _are_close(of))
    others = (f"tensors of norms {', '.join(f'{one.norm:.4g}' for one in of)}" for of in signs if not _are_alike(of))
    shown = next(unlike, "") or next(others, "")
    if not shown:
        return ""
    return (
        f"the processes have written gradients, states of optimizers or copies of parameters with unlike values: "
        f"{shown}, by rank. Each has its own part of them, so the whole would be what none of them meant; use a "
        f"value that all have (a sum or mean over torch.distributed.all_reduce, the same torch.manual_seed before it "
        f"is drawn)"
    )


class _Comparison(NamedTuple):
    """A kind of writes: what is unlike in those of all ranks, and the way out; "" if nothing is.

    Attributes:
        lasts: what was done unlike counts until the other ranks have done the same.
    """

    problem: Callable[[Sequence[Any]], str]
    lasts: bool = False


_COMPARISONS = (
    _Comparison(
        partial(
            _unequally_often,
            "parameter",
            f"A process that writes alone (load_state_dict, copy_, an initialisation) changes its own part of a "
            f"parameter and no other's; {_BY_ALL}, or before hetu_fx.auto_parallelize, which takes process 0's",
        ),
        lasts=True,
    ),
    _Comparison(
        partial(_unequally_often, "buffer", f"Each process has a copy, which the others do not see; {_BY_ALL}"),
        lasts=True,
    ),
    _Comparison(
        partial(
            _unlike_values,
            "parameter",
            f". Each keeps its own part of what it writes, so that the whole would be what none of them meant; {_SAME}",
        )
    ),
    _Comparison(partial(_unlike_values, "buffer", f"; {_SAME}")),
    _Comparison(_unlike_gradients),
    _Comparison(_unlike_rates),
    _Comparison(_unlike_counts, lasts=True),
    _Comparison(_unlike_numbers),
)
"""In the order of `ScriptWrites`."""


def _are_close(numbers: Sequence[float]) -> bool:
    first = numbers[0]
    return all(math.isclose(one, first, rel_tol=1e-4) or str(one) == str(first) for one in numbers)  # nan is like nan


def _unlike(told: Sequence[Mapping[str, Sign]]) -> list[str]:
    """Return the names whose signs are unlike, or not on all ranks."""
    return [name for name in _names(told) if not _are_alike([one.get(name) for one in told])]


def _are_alike(signs: Sequence[Sign | None]) -> bool:
    return all(sign is not None and signs[0] is not None and sign.is_like(signs[0]) for sign in signs)


def _names(told: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    return dict.fromkeys(name for one in told for name in one)


def _were(names: Sequence[str], kind: str) -> str:
    return f"{_named(names, kind)} {'has' if len(names) == 1 else 'have'} been"


def _named(names: Sequence[str], kind: str) -> str:
    """Name some things of a kind."""
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{kind}{'s' * (len(names) > 1)} {shown}{more}"
