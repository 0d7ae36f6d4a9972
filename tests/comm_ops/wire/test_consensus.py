"""What ranks tell each other before a step; a world of one, and the messages of others made up here."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from hetu_fx.comm_ops.wire import consensus
from hetu_fx.comm_ops.wire.consensus import (
    LocalFacts,
    StepFacts,
    agree,
    any_rank,
    broadcast_from_rank0,
    raise_on_all_ranks,
)
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import BatchError, CommError, OtherRankError, PlanError

FACTS = LocalFacts(4, "training x:float32[2]", (7,), ("dim 1 of input 'x'",), 7, (12.0,), told={"compute_seconds": 0.5})
NOTHING_TOLD = ("host_seconds", "probe_seconds", "update_seconds", "peak_bytes", "writes", "inputs")
ALONE = GroupTable.dry(0, 1)
TWO = GroupTable.dry(0, 2)


def told(mine: object, theirs: LocalFacts | Exception) -> object:
    """Return what the other rank brings where this one brings `mine`: signature and state, or an error."""
    if isinstance(theirs, Exception):
        return consensus._RankError(1, type(theirs).__name__, str(theirs))
    return (theirs.shown, dict(theirs.state())) if isinstance(mine, tuple) else None


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a function that says with what the other of two ranks comes."""

    def comes_with(theirs: LocalFacts | Exception) -> None:
        monkeypatch.setattr(consensus, "_exchange", lambda _, row: [row, consensus._encode(theirs)])
        monkeypatch.setattr(consensus, "all_gather_object", lambda _, mine: [mine, told(mine, theirs)])
        monkeypatch.setattr(consensus, "any_rank", lambda _, flags: (True,) * len(flags))

    return comes_with


def test_a_rank_alone_agrees_with_itself() -> None:
    nothing = dict.fromkeys(NOTHING_TOLD, (0.0,))
    assert replace(agree(ALONE, FACTS), graphs=()) == StepFacts((4,), 7, (12.0,), (0.5,), sizes_of=((7,),), **nothing)


def test_sizes_that_may_differ_come_with_the_largest_of_ranks_that_have_rows(other: Any) -> None:
    mine = replace(FACTS, sizes_may_differ=True)
    other(replace(mine, sizes=(9,)))
    agreed = agree(TWO, mine)
    assert (agreed.sizes_of, agreed.sizes, agreed.unequal_sizes) == (((7,), (9,)), (9,), (0,))
    other(replace(mine, sizes=(9,), rows=0))
    agreed = agree(TWO, mine)
    assert (agreed.sizes_of, agreed.sizes, agreed.unequal_sizes) == (((7,), ()), (7,), ())


def test_a_rank_alone_raises_its_error() -> None:
    with pytest.raises(BatchError, match="no rows"):
        agree(ALONE, BatchError("no rows"))


def test_counts_are_summed_and_the_rest_is_kept_by_rank(other: Any) -> None:
    other(replace(FACTS, rows=1, longest=9, counts=(3.0,), told={"compute_seconds": 2.0}))
    nothing = dict.fromkeys(NOTHING_TOLD, (0.0, 0.0))
    agreed = replace(agree(TWO, FACTS), graphs=())
    assert agreed == StepFacts((4, 1), 9, (15.0,), (0.5, 2.0), sizes_of=((7,), (7,)), **nothing)


def test_ranks_that_ask_to_be_drained_are_told_to_all(other: Any) -> None:
    other(replace(FACTS, told={"leaving": True}))
    assert agree(TWO, FACTS).leaving == (1,)
    assert agree(ALONE, replace(FACTS, told={"leaving": True})).leaving == (0,)


def test_a_plan_that_is_ready_and_probes_are_told_to_all(other: Any) -> None:
    other(replace(FACTS, told={"has_plan": True, "probe_seconds": 0.25}))
    facts = agree(TWO, replace(FACTS, told={"probe_seconds": 0.5}))
    assert facts.has_plan
    assert facts.probe_seconds == (0.5, 0.25)
    assert agree(ALONE, replace(FACTS, told={"has_plan": True})).has_plan


def test_a_graph_that_holds_for_some_rows_only_is_asked_by_all(other: Any) -> None:
    other(replace(FACTS, told={"asks_rows": True}))
    assert agree(TWO, FACTS).asks_rows
    other(FACTS)
    assert not agree(TWO, FACTS).asks_rows


def test_what_one_rank_knows_of_a_joining_process_all_learn(other: Any) -> None:
    other(replace(FACTS, told={"is_joined": True}))
    assert agree(TWO, FACTS).is_joined
    assert agree(ALONE, replace(FACTS, told={"is_joined": True})).is_joined


class NobodyComes:
    """Rounds to which no other rank comes."""

    heard: list[Any] = []  # noqa: RUF012
    taken_back = 0

    def say(self, numbers: Any, what: str) -> NobodyComes:
        return self

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise RuntimeError("nobody has come")

    def take_back(self) -> None:
        self.taken_back += 1


def asking(others_wait: Any) -> tuple[GroupTable, NobodyComes]:
    table, rounds = GroupTable.dry(1, 2), NobodyComes()
    table.rounds, table.others_wait, table.timeout = rounds, others_wait, timedelta(seconds=0.2)
    return table, rounds


def test_a_rank_that_asks_goes_alone_once_the_others_are_seen_twice_to_wait_for_it_elsewhere() -> None:
    looks = iter([False, True, False, True, True])
    table, rounds = asking(lambda: next(looks))
    table.timeout = timedelta(seconds=60)
    agreed = agree(table, replace(FACTS, told={"asks": True}))
    assert (agreed.is_asked_alone, agreed.asks, rounds.taken_back) == (True, (1,), 1)
    assert next(looks, None) is None


def test_an_error_of_a_rank_that_asks_alone_is_raised_there_alone() -> None:
    table, rounds = asking(lambda: True)
    table.timeout = timedelta(seconds=60)
    with pytest.raises(PlanError, match="mine"):
        agree(table, PlanError("mine"), {"asks": True, "has_plan": True})
    assert rounds.taken_back == 1


def ended() -> bool:
    raise CommError("rank 0 has ended")


@pytest.mark.parametrize(("others_wait", "asks"), [(lambda: False, True), (ended, True), (lambda: True, False)])
def test_a_rank_waits_where_the_others_may_come_have_ended_or_it_does_not_only_ask(
    others_wait: Any, asks: bool
) -> None:
    table, rounds = asking(others_wait)
    with pytest.raises(CommError, match="nobody has come"):
        agree(table, replace(FACTS, told={"asks": asks}))
    assert rounds.taken_back == 0


def test_an_error_of_another_rank_is_raised_here_with_its_text(other: Any) -> None:
    other(PlanError("too few blocks"))
    with pytest.raises(BatchError, match=r"could not start this step: rank 1: PlanError: too few blocks"):
        agree(TWO, FACTS)


def test_a_rank_raises_its_own_error_unchanged(other: Any) -> None:
    other(FACTS)
    with pytest.raises(PlanError, match="mine"):
        agree(TWO, PlanError("mine"))


def test_other_keys_on_another_rank_are_shown_side_by_side(other: Any) -> None:
    other(replace(FACTS, signature="training y:float32[2]"))
    with pytest.raises(BatchError, match=r"rank 0: training x:float32\[2\]; rank 1: training y:float32\[2\]"):
        agree(TWO, FACTS)


def test_what_stands_behind_unlike_signatures_is_told(other: Any) -> None:
    other(replace(FACTS, signature="other", state=lambda: {"scale": "2.0", "mode": "same"}))
    with pytest.raises(BatchError, match=r"Unlike are: scale is 1.0 on rank 0, 2.0 on rank 1\. rank 0"):
        agree(TWO, replace(FACTS, state=lambda: {"scale": "1.0", "mode": "same"}))


def test_unlike_graphs_are_refused_unless_they_are_looked_for_once_more(other: Any) -> None:
    mine, theirs = (replace(FACTS, graph=f"graph {name}, rows 0") for name in "ab")
    other(theirs)
    with pytest.raises(BatchError, match=r"rank 0: .*, graph a, rows 0; rank 1: .*, graph b, rows 0"):
        agree(TWO, mine)
    assert agree(TWO, mine, takes_unlike_graphs=True).has_unlike_graphs
    other(mine)
    assert not agree(TWO, mine).has_unlike_graphs


def test_what_unlike_graphs_make_of_sizes_is_compared_once_they_are_alike(other: Any) -> None:
    other(replace(FACTS, graph="another", sizes=(), counts=(1.0, 2.0)))
    assert agree(TWO, FACTS, takes_unlike_graphs=True).has_unlike_graphs


def test_unequal_lengths_are_refused_with_the_way_out(other: Any) -> None:
    other(replace(FACTS, sizes=(9,)))
    with pytest.raises(BatchError, match=r"dim 1 of input 'x' has sizes \[7, 9\] on ranks 0 to 1; pad"):
        agree(TWO, FACTS)


def test_a_rank_without_rows_may_have_any_length(other: Any) -> None:
    other(replace(FACTS, rows=0, sizes=(0,), counts=(0.0,)))
    assert agree(TWO, FACTS).rows == (4, 0)


def test_numbers_that_differ_are_refused_with_the_values(other: Any) -> None:
    mine, theirs = (replace(FACTS, values=(value,), value_names=("input 'count'",)) for value in (37.0, 41.0))
    other(theirs)
    with pytest.raises(BatchError, match=r"input 'count' is \[37.0, 41.0\] on ranks 0 to 1; what has no rows is one"):
        agree(TWO, mine)


def test_numbers_that_are_not_a_number_everywhere_agree(other: Any) -> None:
    facts = replace(FACTS, values=(float("nan"),), value_names=("input 'count'",))
    other(facts)
    assert agree(TWO, facts).rows == (4, 4)


def test_more_sizes_than_a_message_holds_are_an_error_that_travels(other: Any) -> None:
    other(FACTS)
    with pytest.raises(BatchError, match=r"the batch has 25 sizes, 1 counts and 0 numbers.*pass fewer tensors"):
        agree(TWO, replace(FACTS, sizes=(1,) * 25))


def test_a_fact_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"not all in the table of facts"):
        agree(ALONE, replace(FACTS, told={"mood": 1.0}))


def test_messages_of_facts_and_errors_have_one_length() -> None:
    lengths = {len(consensus._encode(entry)) for entry in (FACTS, BatchError("no"), LocalFacts(0, ""))}
    assert len(lengths) == 1


def test_different_texts_have_different_exact_digests() -> None:
    first, second = (consensus.hash_text(text) for text in ("a", "b"))
    assert first != second
    assert int(float(first)) == first


@pytest.mark.parametrize(("error", "kind"), [(PlanError("too few: 2"), PlanError), (OSError("full"), OtherRankError)])
def test_what_fails_on_another_rank_only_fails_here_in_the_same_way(other: Any, error: Exception, kind: Any) -> None:
    other(error)
    with pytest.raises(kind, match=f"another rank failed: rank 1: {type(error).__name__}: {error}") as caught:
        raise_on_all_ranks(TWO, lambda: 3)
    assert caught.type is kind


def test_doing_together_alone_gives_the_result_or_the_error() -> None:
    def fail() -> int:
        raise PlanError("mine")

    assert raise_on_all_ranks(ALONE, lambda: 3) == broadcast_from_rank0(ALONE, lambda: 3) == 3
    with pytest.raises(PlanError, match="mine"):
        raise_on_all_ranks(ALONE, fail)
    with pytest.raises(PlanError, match="mine"):
        broadcast_from_rank0(ALONE, fail)


@pytest.mark.parametrize(("error", "kind"), [(PlanError("too few: 2"), PlanError), (OSError("full"), OtherRankError)])
def test_what_fails_on_rank_0_fails_on_the_others_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    sent: list[object] = []

    def fail() -> int:
        raise error

    monkeypatch.setattr(consensus, "from_first", lambda _, value: sent.append(value) or sent[0])
    with pytest.raises(type(error), match=str(error)):
        broadcast_from_rank0(TWO, fail)
    with pytest.raises(kind, match=str(error)) as caught:
        broadcast_from_rank0(GroupTable.dry(1, 2), fail)
    assert caught.type is kind


def test_alone_the_flags_of_any_rank_are_ones_own() -> None:
    assert any_rank(ALONE, [True, False]) == (True, False)
