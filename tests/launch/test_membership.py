"""Nodes join, fall silent, are put out and come back: what one value says of it, whatever order things happen in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.errors import ClusterError
from hetu_fx.launch.membership import Beats, Member, Membership

MOST = 4


def member(node: str) -> Member:
    return Member(node, f"10.0.0.{ord(node) - 96}")


def settled(nodes: str, host: str = "a", number: int = 1) -> Membership:
    return Membership(host, number, tuple(map(member, nodes)))


def nodes(known: Membership | None) -> str:
    assert known is not None
    return "".join(known.member_nodes)


def joined(known: Membership, wanted: str) -> Membership:
    for node in wanted:
        known = known.joining(member(node))
    return known


def test_a_first_round_waits_for_the_last_call_unless_it_is_full() -> None:
    two = joined(Membership("a"), "ab")
    assert two.settled(2, 3, last_call_is_over=False) is None
    assert nodes(two.settled(2, 3, last_call_is_over=True)) == "ab"
    assert nodes(two.settled(2, 2, last_call_is_over=False)) == "ab"
    assert two.settled(3, 3, last_call_is_over=True) is None


def test_a_first_round_waits_for_the_node_that_serves_the_store() -> None:
    one = joined(Membership("a"), "b")
    assert one.settled(1, 3, last_call_is_over=True) is None
    assert nodes(joined(one, "a").settled(1, 3, last_call_is_over=True)) == "ba"


def test_members_keep_their_order_and_newcomers_follow_as_far_as_there_is_room() -> None:
    known = joined(settled("abc"), "zycab").settled(1, 4, last_call_is_over=True)
    assert nodes(known) == "abcz"
    assert known is not None
    assert (known.number, known.joined_nodes) == (2, ("y",))
    assert known.waiting("a", 4) == 0
    assert known.waiting("a", 5) == 1


def test_a_newcomer_can_neither_settle_a_round_nor_put_anybody_out() -> None:
    known = joined(settled("ab"), "c").hearing("c", {"a", "b"})
    assert known.evicted == frozenset()
    assert known.settled(1, 3, last_call_is_over=True) is None


@pytest.mark.parametrize(
    ("accusers", "gone"), [("a", ""), ("ab", ""), ("abc", "d"), ("bc", ""), ("bce", "d"), ("abce", "d")]
)
def test_more_than_half_of_five_members_put_one_out(accusers: str, gone: str) -> None:
    known = settled("abcde")
    for by in accusers:
        known = known.hearing(by, {"d"})
    assert known.evicted == frozenset(gone)


@pytest.mark.parametrize(("host", "gone"), [("a", {"b"}), ("b", set()), ("c", set())])
def test_of_two_nodes_the_stores_side_goes_on_alone(host: str, gone: set[str]) -> None:
    known = settled("ab", host).hearing("a", {"b"})
    assert known.evicted == gone
    alone = known.joining(member("a")).settled(1, 2, last_call_is_over=True)
    assert (alone is None) == (not gone)


def test_a_member_that_was_put_out_learns_it_and_comes_back_as_anybody_does() -> None:
    known = settled("abc").hearing("a", {"c"}).hearing("b", {"c"})
    assert known.waiting("a", 3) == 1
    found = joined(known, "ab").settled(1, 3, last_call_is_over=True)
    assert nodes(found) == "ab"
    assert found is not None
    assert found.waiting("c", 3) == 1
    back = found.joining(member("c"))
    assert back.waiting("a", 3) == 1
    assert nodes(joined(back, "ab").settled(1, 3, last_call_is_over=True)) == "abc"


def test_who_joins_is_no_longer_taken_for_silent() -> None:
    known = settled("ab").hearing("a", {"b"}).joining(member("b"))
    assert known.evicted == frozenset()
    assert known.silent == {}


def test_a_newcomer_that_fell_silent_while_it_waited_is_not_waited_for() -> None:
    known = joined(settled("abc"), "d").hearing("a", {"d"}).hearing("b", {"d"})
    assert known.waiting("a", 4) == 0
    assert nodes(joined(known, "abc").settled(1, 4, last_call_is_over=True)) == "abc"


def test_a_node_that_says_that_it_leaves_is_not_waited_for() -> None:
    known = joined(settled("ab"), "a").leaving("b")
    assert nodes(known.settled(1, 2, last_call_is_over=True)) == "a"


def test_where_the_node_that_serves_leaves_the_first_member_is_host_of_the_round_that_goes_on_without_it() -> None:
    left = joined(settled("abc").leaving("a"), "bc").settled(1, 4, last_call_is_over=True)
    assert left is not None
    assert (left.host, left.serves, left.has_store_left) == ("b", "a", True)
    assert left.hearing("b", "c").evicted == {"c"}
    assert left.hearing("c", "b").evicted == set()
    moved = left.moved("c")
    assert (moved.host, moved.serves, moved.has_store_left) == ("b", "c", False)
    following = joined(moved, "bc").settled(1, 4, last_call_is_over=True)
    assert following is not None
    assert (following.host, following.server, following.has_store_left) == ("c", "", False)


def test_processes_are_numbered_by_the_order_of_their_nodes() -> None:
    unequal = joined(settled("ab"), "b").joining(Member("a", "x", 3)).joining(Member("b", "y", 1))
    known = unequal.joining(Member("c", "z", 2)).settled(1, 3, last_call_is_over=True)
    assert known is not None
    assert (known.world, [known.first_rank(node) for node in "abc"]) == (6, [0, 3, 4])


def test_what_ends_a_round_before_a_steps_end_is_said_to_all_until_the_next_and_a_newcomer_ends_none() -> None:
    torn = settled("ab").joining(member("c"), "a newcomer's").joining(member("b"), "b's").joining(member("a"), "a's")
    assert torn.reason == "b's"
    after = torn.settled(1, 3, last_call_is_over=True)
    assert after is not None
    assert after.reason == ""
    assert settled("ab").leaving("b", "b has gone").reason == "b has gone"
    closed = settled("abc").joining(member("c"), "a peer is gone").closing("b", "an error")
    assert (closed.is_over, closed.reason) == (True, "an error")


def test_a_job_is_over_once_the_work_of_all_members_is_done_and_one_that_joins_again_is_not() -> None:
    one = settled("ab").finishing("a").finishing("stranger")
    assert not one.is_over
    assert one.finishing("b").is_over
    assert one.leaving("b").is_over
    again = one.joining(member("a")).finishing("b")
    assert not again.is_over
    assert not Membership("a").is_over


def test_a_closed_job_settles_nothing() -> None:
    assert replace(joined(Membership("a"), "ab"), is_closed=True).settled(1, 2, last_call_is_over=True) is None


GOOD: dict[str, Any] = {"host": "a", "number": 1, "members": [["a", "x"]], "joined": [], "silent": {}}
GOOD |= {"is_closed": False, "server": "", "done": [], "reason": ""}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "who is in the job"),
        ("[]", "who is in the job"),
        ('{"host": "a"}', "members"),
        (json.dumps(GOOD | {"members": [["a"]]}), "address"),
        (json.dumps(GOOD | {"members": [["a", "x"], ["a", "y"]]}), "twice"),
        (json.dumps(GOOD | {"members": [["a", "x", 1, 65536]]}), "port 65536"),
        (json.dumps(GOOD | {"number": 0}), "before the first"),
        (json.dumps(GOOD | {"done": ["b"]}), "are done, of members"),
        (json.dumps(GOOD | {"silent": {"b": []}}), "no say"),
    ],
)
def test_what_says_not_who_is_in_the_job_is_refused(text: str, why: str) -> None:
    with pytest.raises(ClusterError, match=why):
        Membership.from_json(text)


@pytest.mark.parametrize(
    ("members", "old_side", "new_side", "goes_on"),
    [("abc", "a", "bc", "new"), ("ab", "a", "b", "old"), ("abcd", "ab", "cd", "old"), ("abcd", "a", "bcd", "new")],
)
def test_of_two_stores_after_a_partition_one_at_the_most_settles(
    members: str, old_side: str, new_side: str, goes_on: str
) -> None:
    def outcome(store: Membership, side: str) -> Membership | None:
        for node in side:
            store = store.joining(member(node)).hearing(node, {*members} - {*side})
        return store.settled(1, MOST, last_call_is_over=True)

    last = settled(members)
    old, new = outcome(last, old_side), outcome(last.moved(new_side[0]), new_side)
    assert ("old" if old else "") + ("new" if new else "") == goes_on
    found = old or new
    assert found is not None
    assert (found.number, found.host) == (2, "a" if old else new_side[0])


def test_who_knows_that_the_others_are_gone_goes_on_without_them() -> None:
    left = settled("abc").moved("b").joining(member("b"))
    assert left.settled(1, 3, last_call_is_over=True) is None
    assert nodes(left.without_missing().settled(1, 3, last_call_is_over=True)) == "b"


SOME = st.lists(st.sampled_from("abcdef"), unique=True)


@given(SOME, SOME, st.booleans())
def test_the_text_of_a_membership_is_read_as_it_was(members: list[str], wanted: list[str], is_closed: bool) -> None:
    known = joined(Membership("a", 3, tuple(map(member, members))), "".join(wanted))
    for by in known.electorate:
        known = known.hearing(by, set(known.watched[:1]))
    known = replace(known, is_closed=is_closed, reason="why").finishing("a")
    assert Membership.from_json(known.to_json()) == known
    assert Membership.from_json(known.to_json()).silent == known.silent


def test_a_count_that_moves_is_a_sign_of_life_and_one_that_stands_is_silence() -> None:
    beats = Beats(1.5, 0.6)
    for at in range(8):
        beats.hear({"a": at, "b": 3}, 0.3 * at)
    assert list(beats.silent(2.1)) == ["b"]
    beats.hear({"a": 8, "b": 4}, 2.4)
    assert list(beats.silent(2.4)) == []
    beats.hear({"a": 9, "b": 4}, 2.7)
    beats.hear({"a": 10, "b": 4}, 3.1)
    assert list(beats.silent(3.1)) == []
    assert list(beats.silent(3.1, ["a", "b"])) == ["b"]  # whom others suspect too, and who has missed two beats


def test_a_reader_that_was_stopped_takes_nobody_for_silent() -> None:
    beats = Beats(1.5, 0.6)
    beats.hear({"a": 1}, 0.0)
    beats.hear({"a": 1}, 60.0)
    assert list(beats.silent(60.0)) == []
    for at in (60.3, 60.9, 61.5, 61.8):
        beats.hear({"a": 1}, at)
    assert list(beats.silent(61.8)) == ["a"]


SILENT, BEAT = 1.5, 0.3


@dataclass
class Node:
    """A node as the handler runs it, on a clock of its own."""

    name: str
    skew: float
    rate: float
    beats: Beats = field(default_factory=lambda: Beats(SILENT, 2 * BEAT))
    count: int = 0
    round: int = 0
    wants: bool = False
    is_up: bool = False
    can_reach: bool = True


@dataclass
class Job:
    """Nodes and the one value, which they change one at a time, as compare-and-set makes it."""

    nodes: dict[str, Node]
    known: Membership
    now: float = 0.0
    suspected: frozenset[str] = frozenset()
    rounds: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)

    def turn(self, order: Sequence[str]) -> None:
        """Let every node that is up and reaches the store act once, in some order."""
        self.now += BEAT
        for name in order:
            node = self.nodes[name]
            if node.is_up and node.can_reach:
                self._act(node)

    def _act(self, node: Node) -> None:
        node.count += 1
        now = self.now * node.rate + node.skew
        node.beats.hear({other: self.nodes[other].count for other in self.known.watched}, now)
        self.known = self.known.hearing(node.name, set(node.beats.silent(now, self.suspected)))
        is_in = self.known.number > node.round and node.name in self.known.member_nodes
        if node.wants and is_in:
            node.round, node.wants = self.known.number, False
        elif not node.wants and self.known.waiting(node.name, MOST):
            node.wants = True
        if node.wants and node.name not in self.known.joined_nodes:
            self.known = self.known.joining(member(node.name))
        if node.wants and node.name in self.known.electorate:
            before = self.known
            self.known = before.settled(1, MOST, last_call_is_over=True) or before
            if self.known.number > before.number:
                self.rounds.append((self.known.number, before.electorate, self.known.member_nodes))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_falls_silent_rounds_follow_one_another_and_all_that_come_back_end_in_one(data: st.DataObject) -> None:
    names = "abcd"
    clocks = [(data.draw(st.floats(-1e6, 1e6)), data.draw(st.floats(0.9, 1.1))) for _ in names]
    job = Job({name: Node(name, *clock) for name, clock in zip(names, clocks, strict=True)}, Membership("a"))
    job.nodes["a"].is_up = True
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(names))
        kind = data.draw(st.sampled_from(["up", "down", "cut", "mend"]))
        node = job.nodes[name]
        if name != "a":  # with the host the store is gone
            node.is_up = {"up": True, "down": False}.get(kind, node.is_up)
            node.can_reach = {"cut": False, "mend": True}.get(kind, node.can_reach)
        job.suspected = data.draw(st.frozensets(st.sampled_from(names)))  # rightly or not
        for _ in range(data.draw(st.integers(0, 12))):
            job.turn(data.draw(st.permutations(names)))
    for _ in range(60):
        job.turn(names)
    numbers = [number for number, _, _ in job.rounds]
    assert numbers == list(range(1, len(numbers) + 1))
    for _, before, after in job.rounds:
        kept = {*before} & {*after}
        assert 2 * len(kept) > len(before) or "a" in kept, (before, after)
    for node in job.nodes.values():
        node.is_up = node.can_reach = True
    for _ in range(60):
        job.turn(names)
    assert {*job.known.member_nodes} == {*names}
    assert {node.round for node in job.nodes.values()} == {job.known.number}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_suspected_node_that_shows_signs_of_life_is_not_put_out(data: st.DataObject) -> None:
    names = "abc"
    clocks = [(data.draw(st.floats(-1e6, 1e6)), data.draw(st.floats(0.9, 1.1))) for _ in names]
    job = Job(
        {name: Node(name, *clock, is_up=True) for name, clock in zip(names, clocks, strict=True)}, Membership("a")
    )
    for _ in range(10):
        job.turn(names)
    (settled,) = {node.round for node in job.nodes.values()}
    job.suspected = frozenset(names)
    for _ in range(10):
        job.turn(data.draw(st.permutations(names)))
    assert job.known.number == settled
    job.nodes["c"].is_up = False
    for _ in range(5):  # two missed beats, and what the others need to meet
        job.turn(names)
    assert job.known.member_nodes == ("a", "b")
