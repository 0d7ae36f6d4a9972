"""Many ranks that agree by a tree where nothing is unlike the last time: what they decide is what a gathering says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest

from hetu_fx.comm_ops.plans.sum_tree import sum_tree
from hetu_fx.comm_ops.wire import consensus
from hetu_fx.comm_ops.wire.consensus import GATHER_EVERY, LocalFacts, StepFacts, agree
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import HetuFxError

SIZE = 6
MEASURED = tuple(consensus._UNTOLD)
Told = tuple[LocalFacts | Exception, Mapping[str, float]]
Steps = Sequence[Callable[[int], Told]]


def facts(rows: int = 2, size: int = 7, counts: float = 3.0, **others: Any) -> LocalFacts:
    names = ("dim 1 of input 'x'",)
    return LocalFacts(rows, "training", (size,), names, size, (counts,), (0.5,), ("scale",), **others)


@pytest.fixture(params=[1, 3, SIZE])
def outcomes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a function that plays steps on ranks of some nodes, with the tree or without: outcomes and gatherings."""

    def played(steps: Steps, *, by_tree: bool, takes_unlike_graphs: bool = False) -> tuple[list[list[Any]], int]:
        monkeypatch.setattr(consensus, "TREE_RANKS", 2 if by_tree else SIZE + 1)
        gathered = []
        exchange = consensus._exchange
        monkeypatch.setattr(consensus, "_exchange", lambda table, row: (gathered.append(1), exchange(table, row))[1])

        def work(table: GroupTable) -> list[Any]:
            nodes = [rank % request.param for rank in range(SIZE)]
            table.found_out[consensus._Steady] = consensus._Steady(sum_tree(nodes).steps(table.rank))
            return [outcome(table, *step(table.rank), takes_unlike_graphs) for step in steps]

        made = run_in_threads(SIZE, work, seconds=100)
        monkeypatch.setattr(consensus, "_exchange", exchange)
        return made, len(gathered) // SIZE

    return played


def outcome(table: GroupTable, told: LocalFacts | Exception, more: Mapping[str, float], takes: bool) -> Any:
    try:
        return agree(table, told, more, takes_unlike_graphs=takes)
    except (HetuFxError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def without_measured(outcome: Any) -> Any:
    if not isinstance(outcome, StepFacts):
        return outcome
    return {name: value for name, value in vars(outcome).items() if name not in MEASURED}


def random_step(random: Random) -> Callable[[int], Told]:
    """Return a step in which most often nothing is new; else a change on all ranks, or on one."""
    same, one = random.choice([7, 7, 7, 8]), random.randrange(SIZE)
    change = random.choice(["", "", "", "", "size", "rows", "leaving", "error", "signature", "graph", "writes", "asks"])
    seconds = [random.random() for _ in range(SIZE)]

    def step(rank: int) -> Told:
        is_it = rank == one
        if change == "error" and is_it:
            return ValueError(f"no batch on rank {rank}"), {}
        told = {"compute_seconds": seconds[rank]}
        told |= {change: 1.0} if is_it and change in ("leaving", "writes") else {}
        told |= {"asks": 1.0} if change == "asks" else {}
        brought = facts(
            rows=2 + (change == "rows" and is_it),
            size=same + (change == "size" and is_it),
            counts=float(rank + same),
            graph="other" if change == "graph" and is_it else "graph",
            told={"is_joined": False},
        )
        return (LocalFacts(2, "evaluation") if change == "signature" and is_it else brought), told

    return step


@pytest.mark.parametrize("takes_unlike_graphs", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_outcomes_are_those_of_gathering_in_every_step(outcomes: Any, seed: int, takes_unlike_graphs: bool) -> None:
    random = Random(seed)
    steps = [random_step(random) for _ in range(30)]
    with_tree, few = outcomes(steps, by_tree=True, takes_unlike_graphs=takes_unlike_graphs)
    without, all_steps = outcomes(steps, by_tree=False, takes_unlike_graphs=takes_unlike_graphs)
    for rank in range(SIZE):
        assert list(map(without_measured, with_tree[rank])) == list(map(without_measured, without[rank]))
        for found, whole in zip(with_tree[rank], without[rank], strict=True):
            if isinstance(found, StepFacts) and found.compute_seconds:
                assert found.compute_seconds == whole.compute_seconds
    assert few < all_steps == 30


def test_what_ranks_measure_is_gathered_in_one_of_some_steps_and_a_probe_is_kept_until_then(outcomes: Any) -> None:
    def step(number: int) -> Callable[[int], Told]:
        return lambda rank: (facts(), {"compute_seconds": number + 1.0, "probe_seconds": 9.0 * (number == 3)})

    count = GATHER_EVERY + 2
    made, gathered = outcomes([step(number) for number in range(count)], by_tree=True)
    told = [found.compute_seconds for found in made[0]]
    assert told == [(1.0,) * SIZE, *[()] * GATHER_EVERY, (count * 1.0,) * SIZE]
    assert [found.probe_seconds for found in made[0]][-1] == (9.0,) * SIZE
    assert gathered == 2


def test_sizes_and_counts_that_change_on_all_ranks_alike_are_not_gathered(outcomes: Any) -> None:
    made, gathered = outcomes([lambda rank, s=s: (facts(size=s, counts=rank), {}) for s in (7, 9, 5)], by_tree=True)
    assert [(found.sizes, found.longest, found.counts) for found in made[0]] == [
        ((size,), size, (sum(range(SIZE)) * 1.0,)) for size in (7, 9, 5)
    ]
    assert gathered == 1


def test_one_rank_that_only_asks_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with one call more than the others, who hear it and go on to exchange facts."""

    def work(table: GroupTable) -> list[int]:
        table.found_out[consensus._Steady] = consensus._Steady(sum_tree(range(SIZE)).steps(table.rank))
        agree(table, facts())
        alone = [agree(table, facts(), {"asks": 1.0}).is_asked_alone] if table.rank == 2 else []
        return [*alone, agree(table, facts()).rows == (2,) * SIZE]

    monkeypatch.setattr(consensus, "TREE_RANKS", 2)
    assert run_in_threads(SIZE, work, seconds=100) == [[True, True] if rank == 2 else [True] for rank in range(SIZE)]


def test_few_ranks_or_those_that_share_memory_have_no_tree() -> None:
    def work(table: GroupTable) -> object:
        return consensus._steady(table)

    assert run_in_threads(2, work, seconds=100) == [None, None]
