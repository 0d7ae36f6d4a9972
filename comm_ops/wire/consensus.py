"""What all ranks must know of each other before a step: a table of facts, exchanged in one small message.

Every rank tells its numbers (`LocalFacts`), each is combined as the table says (`StepFacts`), and batches that do not
fit together are refused. An error on one rank travels too, so that all ranks raise instead of waiting for each other.

Where ranks are many, the numbers of each are gathered only where something is unlike the last time. Most steps are
not: then a sum of a few numbers over a tree tells all ranks so (`_Steady`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from time import perf_counter, sleep
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx import errors
from hetu_fx.base.machine import node_name
from hetu_fx.comm_ops.plans.sum_tree import SumSteps, sum_tree
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, Round, guarded, using
from hetu_fx.comm_ops.wire.objects.messages import broadcast, gather
from hetu_fx.comm_ops.wire.small_sums import reduce_small, sum_by_tree
from hetu_fx.errors import BatchError, CommError, HetuFxError, OtherRankError

T = TypeVar("T")
Numbers = Sequence[float]
Count = float | Tensor
"""A number of rows or tokens; a tensor without dims where the host has not waited for its device to tell."""


def _counts(numbers: Numbers) -> tuple[int, ...]:
    return tuple(map(int, numbers))


def _largest(numbers: Numbers) -> int:
    return int(max(numbers, default=0))


def _ranks_that_do(numbers: Numbers) -> tuple[int, ...]:
    return tuple(rank for rank, number in enumerate(numbers) if number)


_EACH, _ALIKE, _MOST, _SAMPLED, _KEPT = "each", "alike", "most", "sampled", "kept"


def _fact(combine: Callable[[Numbers], Any], kind: str = _EACH) -> Any:
    """Make a fact: a number that every rank tells under the fact's name, 0 if it says nothing, and its combination.

    The kind says how it is told where ranks are many: `_EACH` stays what it was on each rank, or all are gathered; so
    does `_ALIKE`, or becomes another that is the same on all; of `_MOST` the largest is told; `_SAMPLED` is told in one
    of some steps, and `_KEPT` until then, as it is told once.
    """
    return field(default=combine(()), metadata={"combine": combine, "kind": kind})


@dataclass(frozen=True)
class StepFacts:
    """The table of facts: what all ranks agree on for one step, the same on every rank. A new fact is one line.

    Seconds and bytes of ranks are () in steps in which many ranks do not tell them.

    Attributes:
        rows: rows of the batch that each rank brings.
        longest: longest sequence in the batch.
        counts: sums over ranks, in the order of the program's count leaves.
        compute_seconds: of each rank's last step, communication left out; 0 if unknown.
        host_seconds: that each rank's host has spent in its last step, without the model's own ops and without waiting.
        leaving: the ranks that ask to be drained before the step.
        ending: the ranks that were told to end, and ask for a checkpoint before the step.
        has_plan: a rank has made the plan that it was to make in the background, or has failed to.
        probe_seconds: of a small piece of compute that tells a device's speed without work; 0 if it ran none.
        is_joined: a rank knows of a process that is ready to join.
        update_seconds: of each rank's optimizers since the last facts; 0 if unknown.
        peak_bytes: the most memory that each rank has had so far; 0 if nobody asks it.
        writes: of each rank to parameters and what belongs to them, as a number that tells unlike ones; the same on all
            ranks, or they are told.
        inputs: of what all ranks must pass alike, a number for its values; 0 in a step in which it is not compared.
        graphs: of each rank, a number for the graph that it has found for its rows.
        asks_rows: a rank's graph holds for some numbers of rows only, by what it compares of sizes.
        asks: the ranks that only look at what the model makes: they call it without gradients.
        sizes_of: by rank, the sizes of its inputs; () where it has no rows, unless none has any.
    """

    rows: tuple[int, ...] = _fact(_counts)
    longest: int = _fact(_largest, _MOST)
    counts: tuple[Count, ...] = ()
    compute_seconds: tuple[float, ...] = _fact(tuple, _SAMPLED)
    host_seconds: tuple[float, ...] = _fact(tuple, _SAMPLED)
    leaving: tuple[int, ...] = _fact(_ranks_that_do)
    ending: tuple[int, ...] = _fact(_ranks_that_do)
    has_plan: bool = _fact(any)
    probe_seconds: tuple[float, ...] = _fact(tuple, _KEPT)
    is_joined: bool = _fact(any)
    update_seconds: tuple[float, ...] = _fact(tuple, _SAMPLED)
    peak_bytes: tuple[float, ...] = _fact(tuple, _SAMPLED)
    writes: tuple[float, ...] = _fact(tuple, _ALIKE)
    inputs: tuple[float, ...] = _fact(tuple, _ALIKE)
    graphs: tuple[float, ...] = _fact(tuple, _ALIKE)
    asks_rows: bool = _fact(any, _ALIKE)
    asks: tuple[int, ...] = _fact(_ranks_that_do)
    sizes_of: tuple[tuple[int, ...], ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the largest of each."""
        return tuple(map(max, self._sizes))

    @property
    def is_asked_alone(self) -> bool:
        """Tell whether some ranks only look at what the model makes, while others do something else."""
        return 0 < len(self.asks) < len(self.rows)

    @property
    def has_unlike_graphs(self) -> bool:
        """Tell whether ranks have found unlike graphs."""
        return len(set(self.graphs)) > 1

    @property
    def unequal_sizes(self) -> tuple[int, ...]:
        """Return the places, among `sizes`, of those that are smaller on some ranks."""
        return tuple(place for place, sizes in enumerate(self._sizes) if len(set(sizes)) > 1)

    @property
    def _sizes(self) -> Iterable[tuple[int, ...]]:
        return zip(*filter(None, self.sizes_of), strict=True)


_COMBINE: Mapping[str, Callable[[Numbers], Any]] = {
    fact.name: fact.metadata["combine"] for fact in fields(StepFacts) if fact.metadata
}
"""How the numbers of all ranks are combined, by fact, in the order of the message."""

_PLACES = {name: place for place, name in enumerate(_COMBINE)}

_KINDS = {fact.name: fact.metadata["kind"] for fact in fields(StepFacts) if fact.metadata}

_NOTHING: Mapping[str, float] = MappingProxyType({})
_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.02, 0.5
_MAX_SIZES = 24
_MAX_COUNTS = 16
_MAX_VALUES = 8
_MOST_SHOWN = 200  # letters of what a rank's batch is
_MOST_TOLD = 10
_ERROR, _DIGEST, _FIRST_FACT = range(3)
_ROWS = _FIRST_FACT + _PLACES["rows"]
_ASKS = _FIRST_FACT + _PLACES["asks"]
_FIRST_SIZE = _FIRST_FACT + len(_COMBINE)
_FIRST_COUNT = _FIRST_SIZE + _MAX_SIZES
_FIRST_VALUE = _FIRST_COUNT + _MAX_COUNTS
_WIDTH = _FIRST_VALUE + _MAX_VALUES

TREE_RANKS = 32
"""From so many on, ranks tell each other by a tree what is as it was."""

GATHER_EVERY = 8
"""Steps after which they gather once more what each has measured."""


def _places_of(*kinds: str) -> tuple[int, ...]:
    return tuple(_FIRST_FACT + _PLACES[name] for name, kind in _KINDS.items() if kind in kinds)


_EACH_PLACES = (_ERROR, *_places_of(_EACH))
_ALIKE_PLACES = (_DIGEST, *_places_of(_ALIKE), *range(_FIRST_SIZE, _FIRST_COUNT), *range(_FIRST_VALUE, _WIDTH))
_KEPT_PLACES = _places_of(_KEPT)
_LONGEST = _FIRST_FACT + _PLACES["longest"]
_UNTOLD: Mapping[str, Any] = {name: () for name, kind in _KINDS.items() if kind in (_SAMPLED, _KEPT)}


@dataclass(frozen=True)
class LocalFacts:
    """One rank's side of a step.

    Attributes:
        rows: rows of the batch that this rank brings.
        signature: text that must be the same on all ranks (keys, dtypes, static values).
        graph: text that must be the same on all ranks once they know the rows of all: it says which graph runs them.
        sizes: sizes that must be the same on all ranks (every dim but the rows), in the order of `size_names`.
        size_names: what the sizes are, for messages.
        longest: longest sequence in the batch.
        counts: local counts, in the order of the program's count leaves.
        values: numbers that must be the same on all ranks (tensors of no dim), in the order of `value_names`.
        value_names: what the values are, for messages.
        told: this rank's numbers for the other facts, by the names in `StepFacts`; 0 where it says nothing.
        sizes_may_differ: this rank fills its inputs up to the largest sizes of all.
        state: gives what stands behind the signature, by what it is of: for a message that says what is unlike.
    """

    rows: int
    signature: str
    sizes: tuple[int, ...] = ()
    size_names: tuple[str, ...] = ()
    longest: int = 0
    counts: tuple[Count, ...] = ()
    values: tuple[float, ...] = ()
    value_names: tuple[str, ...] = ()
    told: Mapping[str, float] = field(default_factory=dict)
    sizes_may_differ: bool = False
    graph: str = ""
    state: Callable[[], Mapping[str, str]] = field(default=dict, compare=False)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return this rank's number for every fact of the table, in its order."""
        told = {"rows": self.rows, "longest": self.longest, "graphs": self._graph, **self.told}
        assert told.keys() <= _COMBINE.keys(), f"{list(told)} are not all in the table of facts {list(_COMBINE)}"
        return tuple([float(told.get(name, 0.0)) for name in _COMBINE])

    @property
    def _graph(self) -> int:
        return hash_text(f"{self.graph}|{len(self.sizes)}|{len(self.counts)}|{len(self.values)}")

    @property
    def shown(self) -> str:
        """Return what must be the same on all ranks, for messages."""
        return f"{self.signature}, {self.graph}" if self.graph else self.signature

    @cached_property
    def row(self) -> tuple[float, ...]:
        """Return all as it stands in the message; worked out once for the facts of batches that are alike."""
        lists = _padded(self.sizes, _MAX_SIZES), _padded(self.counts, _MAX_COUNTS), _padded(self.values, _MAX_VALUES)
        return (0.0, float(hash_text(self.signature)), *self.numbers, *chain.from_iterable(lists))


def agree(
    table: GroupTable,
    facts: LocalFacts | Exception,
    told: Mapping[str, float] = _NOTHING,
    *,
    takes_unlike_graphs: bool = False,
) -> StepFacts:
    """Exchange facts between all ranks of the table; collective.

    Ranks that only look at what the model makes do so alone where others do something else: they get the facts, which
    hold for no step (`is_asked_alone`), and the others go on to exchange facts with what those ranks come with next. So
    does one rank where the others wait for it elsewhere (`GroupTable.others_wait`), at a barrier for example.

    Args:
        table: the ranks.
        facts: what this one brings to the step, or why it cannot.
        told: more numbers of it, as in `LocalFacts`: those that are others in each step.
        takes_unlike_graphs: graphs of ranks' own rows may be unlike, as they are looked for once more where they are.

    Raises:
        BatchError: on every rank, if the ranks' batches do not fit together.
        Exception: on every rank, if some rank came with an error: there its own, on the others a BatchError. If that
            rank asks alone, there only.
    """
    if table.size == 1:
        if isinstance(facts, Exception):
            raise facts
        return _combined([_with_told(facts.numbers, told)], facts.counts, (facts.sizes,))
    facts, steady = _fitting(facts), _steady(table)
    row = _encode(facts, told)
    if steady is not None:
        if (found := steady.agree(table, facts, row)) is not None:
            return found
        row = steady.forget(row)
    gathered, agreed = _exchanged(table, facts, row)
    while agreed.is_asked_alone:
        if table.rank in agreed.asks:
            return agreed
        gathered, agreed = _exchanged(table, facts, row)
    assert isinstance(facts, LocalFacts)
    is_unlike = agreed.has_unlike_graphs
    _check_signatures(table, gathered, facts, is_unlike=is_unlike and not takes_unlike_graphs)
    if not is_unlike:
        _check_equal(gathered, facts, agreed.rows)
        if steady is not None:
            steady.know(agreed, facts, row)
    return agreed


@dataclass(slots=True)
class _Steady:
    """What the ranks have agreed on last, as long as a sum over all tells that it holds.

    Attributes:
        steps: of the sum, this rank's.
        facts: those of the last time; None: nothing holds, all is to be gathered.
        each, alike: what this rank has told for it, of its own and of what must be the same on all ranks.
        count: times since all was gathered.
        kept: what it has told once since then, by place.
    """

    steps: SumSteps
    facts: StepFacts | None = None
    each: bytes = b""
    alike: bytes = b""
    count: int = 0
    kept: dict[int, float] = field(default_factory=dict)

    def agree(self, table: GroupTable, facts: LocalFacts | Exception, row: Numbers) -> StepFacts | None:
        """Return what ranks agree on where each is as it was, or all have become alike; else None, on all ranks.

        Collective, unless all are to be gathered anyway.
        """
        self.kept |= {place: row[place] for place in _KEPT_PLACES if row[place]}
        if self.facts is None or self.count == GATHER_EVERY:
            return None
        self.count += 1
        each, alike = _told_bytes(facts, row)
        is_other = each != self.each
        digest = _digest(alike)
        sums, largest = sum_by_tree(
            [is_other, is_other or alike != self.alike, *row[_FIRST_COUNT:_FIRST_VALUE]],
            [digest, -digest, row[_LONGEST]],
            self.steps,
            table,
            "agreement on the step",
        )
        if sums[0] or (sums[1] and largest[0] != -largest[1]):
            return None
        assert isinstance(facts, LocalFacts)
        held = _alike_on_all(self.facts, facts, row) if sums[1] else self.facts
        counts = tuple(sums[2 : 2 + len(facts.counts)])
        self.facts = replace(held, counts=counts, longest=int(largest[2]), **_UNTOLD)
        self.alike = alike
        return self.facts

    def forget(self, row: Numbers) -> Numbers:
        """Begin anew, as all is gathered; return the row with what this rank has told once since the last time."""
        kept, self.facts, self.kept = self.kept, None, {}
        return [kept.get(place, 0.0) or number for place, number in enumerate(row)]

    def know(self, agreed: StepFacts, facts: LocalFacts, row: Numbers) -> None:
        """Hold what has been gathered, and fits together."""
        self.facts, self.count = agreed, 0
        self.each, self.alike = _told_bytes(facts, row)


def _steady(table: GroupTable) -> _Steady | None:
    """Return what many ranks have agreed on last, if they can tell so by a tree; the first call is collective."""
    if table.size < TREE_RANKS or table.rounds is not None or table.transport.device(table.base).type != "cpu":
        return None
    if _Steady not in table.found_out:
        table.found_out[_Steady] = _Steady(sum_tree(all_gather_object(table, node_name())).steps(table.rank))
    found: _Steady = table.found_out[_Steady]
    return found


def _told_bytes(facts: LocalFacts | Exception, row: Numbers) -> tuple[bytes, bytes]:
    """Return as bytes, in which what is no number equals itself, what is a rank's own, and what must be alike."""
    may_differ = isinstance(facts, LocalFacts) and facts.sizes_may_differ
    each, alike = ([row[place] for place in places] for places in (_EACH_PLACES, _ALIKE_PLACES))
    return struct.pack(f"{len(each)}d", *each), struct.pack(f"{len(alike)}d?", *alike, may_differ)


def _alike_on_all(last: StepFacts, facts: LocalFacts, row: Numbers) -> StepFacts:
    """Return facts in which all ranks have told what this one has of what must be alike."""
    count = len(last.rows)
    told = {n: (row[_FIRST_FACT + _PLACES[n]],) * count for n, kind in _KINDS.items() if kind == _ALIKE}
    has_rows = any(last.rows)
    sizes_of = tuple([facts.sizes if rows or not has_rows else () for rows in last.rows])
    return replace(last, sizes_of=sizes_of, **{name: _COMBINE[name](numbers) for name, numbers in told.items()})


def _exchanged(table: GroupTable, facts: LocalFacts | Exception, row: Numbers) -> tuple[Sequence[Numbers], StepFacts]:
    """Return what all ranks have said, and what that comes to; raises on all ranks what one of them came with.

    What a rank came with that asks alone is raised there alone: the others do not wait for it.
    """
    gathered = _exchange(table, row)
    ranks = [row[_FIRST_FACT:_FIRST_SIZE] for row in gathered]
    agreed = _combined(ranks, (), ())
    if agreed.is_asked_alone:
        if isinstance(facts, Exception) and table.rank in agreed.asks:
            raise facts
        return gathered, agreed
    if any(row[_ERROR] for row in gathered):
        _raise_everywhere(table, facts)
    assert isinstance(facts, LocalFacts)
    counts = tuple(sum(row[_FIRST_COUNT + i] for row in gathered) for i in range(len(facts.counts)))
    return gathered, replace(agreed, counts=counts, sizes_of=_sizes_of(gathered, len(facts.sizes)))


def _combined(ranks: Sequence[Numbers], counts: tuple[Count, ...], sizes_of: tuple[tuple[int, ...], ...]) -> StepFacts:
    columns = zip(_COMBINE.items(), zip(*ranks, strict=True), strict=True)
    return StepFacts(counts=counts, sizes_of=sizes_of, **{name: combine(column) for (name, combine), column in columns})


def _sizes_of(gathered: Sequence[Numbers], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of the ranks that have rows (of all, if none has any)."""
    told = [tuple(map(int, row[_FIRST_SIZE : _FIRST_SIZE + count])) for row in gathered]
    has_rows = [row[_ROWS] > 0 for row in gathered]
    return tuple(sizes if has or not any(has_rows) else () for sizes, has in zip(told, has_rows, strict=True))


def raise_on_all_ranks(table: GroupTable, act: Callable[[], T]) -> T:
    """Do something local on every rank, and raise on all ranks if it failed on one; collective.

    Raises:
        Exception: the rank's own error; where another rank failed, one of the same kind if it is a HetuFxError, else an
            OtherRankError.
    """
    outcome: T | Exception
    try:
        outcome = act()
    except Exception as error:  # whatever it is, the others must not wait for this rank
        outcome = error
    failed = any_rank(table, [isinstance(outcome, Exception)])[0]
    told = _errors_of_all(table, outcome) if failed and table.size > 1 else []
    if isinstance(outcome, Exception):
        raise outcome
    if told:
        raise told[0].to_error(f"another rank failed: {_joined(told)}")
    return outcome


def any_rank(table: GroupTable, flags: Sequence[bool]) -> tuple[bool, ...]:
    """Tell which flags are set on any rank; collective."""
    if table.size == 1:
        return tuple(flags)
    counts = torch.tensor(flags, dtype=torch.int32, device=table.transport.device(table.base))
    reduce_small(counts, dist.ReduceOp.SUM, table, "agreement on flags")
    return tuple(count > 0 for count in counts.tolist())


def alike(table: GroupTable, digest: int) -> bool:
    """Tell whether all ranks, several, have the same number of 48 bits; collective."""
    bounds = torch.tensor([digest, -digest], dtype=torch.float64, device=table.transport.device(table.base))
    reduce_small(bounds, dist.ReduceOp.MAX, table, "agreement on what is alike")
    return bool(bounds.sum() == 0)


def hash_text(text: str) -> int:
    """Hash a text to 48 bits, which a float64 carries exactly; the same in every process."""
    return _digest(text.encode())


def _digest(told: bytes) -> int:
    return int.from_bytes(hashlib.sha256(told).digest()[:6], "big")


def from_first(table: GroupTable, value: T) -> T:
    """Return rank 0's value on every rank; collective. Raises as `messages.broadcast` does."""
    return broadcast(value, table)


def all_gather_object(table: GroupTable, value: T) -> list[T]:
    """Return the values of all ranks, in their order; collective. Raises as `messages.gather` does."""
    return [value] if table.size == 1 else gather(value, table, table.base, range(table.size), "agreement")


def broadcast_from_rank0(table: GroupTable, act: Callable[[], T]) -> T:
    """Do something on rank 0 alone, and return its result on every rank; collective.

    Raises:
        Exception: rank 0's own; on the others one of the same kind if it is a HetuFxError, else an OtherRankError.
    """
    outcome: T | _RankError | None = None
    if table.rank == 0:
        try:
            outcome = act()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            text = str(error) if isinstance(error, HetuFxError) else repr(error)
            from_first(table, _RankError(0, type(error).__name__, text))
            raise
    told = from_first(table, outcome)
    if isinstance(told, _RankError):
        raise told.to_error(told.text)
    return cast(T, told)


def _fitting(facts: LocalFacts | Exception) -> LocalFacts | Exception:
    """Return the facts, or an error to exchange in their place if they are more than a message holds."""
    if isinstance(facts, Exception):
        return facts
    numbers = len(facts.sizes), len(facts.counts), len(facts.values)
    if all(number <= most for number, most in zip(numbers, (_MAX_SIZES, _MAX_COUNTS, _MAX_VALUES), strict=True)):
        return facts
    return BatchError(
        f"the batch has {numbers[0]} sizes, {numbers[1]} counts and {numbers[2]} numbers, more than the {_MAX_SIZES}, "
        f"{_MAX_COUNTS} and {_MAX_VALUES} that ranks agree on; pass fewer tensors"
    )


def _encode(facts: LocalFacts | Exception, told: Mapping[str, float] = _NOTHING) -> Numbers:
    if isinstance(facts, Exception):
        asks = {name: told[name] for name in told if name == "asks"}
        return _with_told([1.0] + [0.0] * (_WIDTH - 1), asks, _FIRST_FACT)
    return _with_told(facts.row, told, _FIRST_FACT)


def _with_told(numbers: Numbers, told: Mapping[str, float], first: int = 0) -> Numbers:
    """Put more that is told in its place; facts begin at the place `first`."""
    assert told.keys() <= _PLACES.keys(), f"{list(told)} are not all in the table of facts {list(_PLACES)}"
    made = list(numbers)
    for name, number in told.items():
        made[first + _PLACES[name]] = float(number)
    return made


def _padded(numbers: Sequence[Count], length: int) -> list[float]:
    return [*map(float, numbers), *[0.0] * (length - len(numbers))]


def _exchange(table: GroupTable, row: Sequence[float]) -> Sequence[Numbers]:
    what, ranks = "agreement on the step", range(table.size)
    if table.rounds is not None:
        with guarded(what, ranks, table):
            said = table.rounds.say(row, what)
            if row[_ASKS] and _is_alone(table, said):
                said.take_back()
                return [row if rank == table.rank else [0.0] * _WIDTH for rank in ranks]
            said.wait()
        return said.heard
    mine = torch.tensor(row, dtype=torch.float64, device=table.transport.device(table.base))
    everyone = mine.new_empty(table.size, len(row))
    with using(table), guarded(what, ranks):
        table.transport.all_gather([Flat(row) for row in everyone.unbind()], Flat(mine), table.base)
    told: list[list[float]] = everyone.tolist()
    return told


def _is_alone(table: GroupTable, said: Round) -> bool:
    """Wait until the others have come to a round, or are seen to wait for this rank elsewhere: they do not come then.

    It is looked twice: one that has come to a collective elsewhere may just be leaving it.
    """
    pause, is_seen, deadline = _LOOK_SECONDS, False, perf_counter() + table.timeout.total_seconds()
    while table.others_wait is not None and perf_counter() < deadline and not _comes_within(said, pause):
        if table.path is not None:
            table.path.check()
        was_seen = is_seen
        try:
            is_seen = table.others_wait()
        except CommError:  # one has ended, or is stopped: whoever waits for it says so
            return False
        if is_seen and was_seen:
            return True
        pause = _LOOK_SECONDS if is_seen else min(2 * pause, _MOST_LOOK_SECONDS)
    return False


def _comes_within(said: Round, seconds: float) -> bool:
    start = perf_counter()
    while not said.is_completed():
        waited = perf_counter() - start
        if waited > seconds:
            return False
        sleep(waited / 8)
    return True


def _raise_everywhere(table: GroupTable, facts: LocalFacts | Exception) -> None:
    told = _errors_of_all(table, facts)
    if isinstance(facts, Exception):
        raise facts
    raise BatchError(f"another rank could not start this step: {_joined(told)}")


@dataclass(frozen=True, slots=True)
class _RankError:
    """An error of a rank, as others are told of it: its class by name, as a class need not be there to be sent."""

    rank: int
    kind: str
    text: str

    def to_error(self, text: str) -> HetuFxError:
        """Return an error for the ranks that did not have it: of its class where that is one of ours."""
        kind = getattr(errors, self.kind, None)
        return kind(text) if isinstance(kind, type) and issubclass(kind, HetuFxError) else OtherRankError(text)


def _errors_of_all(table: GroupTable, mine: object) -> list[_RankError]:
    """Return the errors that ranks came with; collective."""
    own = _RankError(table.rank, type(mine).__name__, str(mine)) if isinstance(mine, Exception) else None
    return [error for error in all_gather_object(table, own) if error is not None]


def _joined(told: Sequence[_RankError]) -> str:
    return "; ".join(f"rank {error.rank}: {error.kind}: {error.text}" for error in told)


def _check_signatures(table: GroupTable, gathered: Sequence[Numbers], facts: LocalFacts, *, is_unlike: bool) -> None:
    if is_unlike or len({row[_DIGEST] for row in gathered}) > 1:
        signatures, states = zip(*all_gather_object(table, (facts.shown, dict(facts.state()))), strict=True)
        shown = "; ".join(f"rank {rank}: {text[:_MOST_SHOWN]}" for rank, text in enumerate(signatures))
        told = ". ".join(filter(None, (_unlike(states), shown)))
        raise BatchError(
            f"the ranks' batches differ in keys, dtypes or static values, or their models do, or the graph that these "
            f"led to (told by its hash). {told}\n"
            "hint: give all ranks the same keys, dtypes and static values in a step (one task for all; strings that "
            "forward does not read may differ), change a model "
            "on all ranks in the same way, before the same step, and use the same version of every package"
        )


def _check_equal(gathered: Sequence[Numbers], facts: LocalFacts, rows: Sequence[int]) -> None:
    for i, name in enumerate(() if facts.sizes_may_differ else facts.size_names):
        sizes = [int(row[_FIRST_SIZE + i]) for row in gathered]
        if len({size for size, count in zip(sizes, rows, strict=True) if count}) > 1:
            raise BatchError(
                f"{name} has sizes {sizes} on ranks 0 to {len(gathered) - 1}; pad all ranks' batches of a step to the "
                f"same size (only the number of rows may differ)"
            )
    for i, name in enumerate(facts.value_names):
        values = [row[_FIRST_VALUE + i] for row in gathered]
        if len(set(map(str, values))) > 1:  # as text: nan is not equal to itself
            raise BatchError(
                f"{name} is {values} on ranks 0 to {len(gathered) - 1}; what has no rows is one value of the whole "
                f"batch: pass the same on all ranks (such as the number of items of all of them)"
            )


def _unlike(states: Sequence[Mapping[str, str]]) -> str:
    """Say which facts are not the same on all ranks."""
    everything = dict.fromkeys(what for state in states for what in state)
    columns = {what: [state.get(what, "none") for state in states] for what in everything}
    lines = [
        f"{what} is " + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
        for what, values in columns.items()
        if len(set(values)) > 1
    ]
    return f"Unlike are: {'; '.join(lines[:_MOST_TOLD])}" if lines else ""
