"""Orders of calls in which NCCL hangs are found, planted ones and no others; ours have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetu_fx.comm_ops.wire import p2p, threads
from hetu_fx.comm_ops.wire.groups import GroupTable
from tests.comm_ops.wire.simulated_nccl import Posted, RecordingTransport, Sent, hang_of
from tests.end_to_end.cells import PLANS, Cell
from tests.end_to_end.parity_lockstep import check_trained, trained

BOTH = (0, 1)
X = "8 of torch.float32"


def send(peer: int, form: str = X) -> Sent:
    return Sent(peer, True, form)


def receive(peer: int, form: str = X) -> Sent:
    return Sent(peer, False, form)


def group_call(*messages: Sent, within: str = "world") -> Posted:
    return Posted(within, BOTH, messages=messages)


def collective(name: str, within: str = "world", members: tuple[int, ...] = BOTH) -> Posted:
    return Posted(within, members, collective=name)


HANGS = {
    "both send before they receive": {
        0: [group_call(send(1)), group_call(receive(1))],
        1: [group_call(send(0)), group_call(receive(0))],
    },
    "both receive before they send": {
        0: [group_call(receive(1)), group_call(send(1))],
        1: [group_call(receive(0)), group_call(send(0))],
    },
    "collectives of two communicators in two orders": {
        0: [collective("all_reduce", "one"), collective("all_reduce", "two")],
        1: [collective("all_reduce", "two"), collective("all_reduce", "one")],
    },
    "a message behind a collective": {
        0: [group_call(send(1)), collective("all_reduce")],
        1: [collective("all_reduce"), group_call(receive(0))],
    },
    "a message that nobody receives": {0: [group_call(send(1))], 1: []},
    "a circle of three": {
        rank: [
            Posted("world", (0, 1, 2), messages=(send((rank + 1) % 3),)),
            Posted("world", (0, 1, 2), messages=(receive((rank - 1) % 3),)),
        ]
        for rank in range(3)
    },
    "two of three whose first call is a message between them": {
        **{rank: [Posted("world", (0, 1, 2), messages=(one,))] for rank, one in ((0, send(1)), (1, receive(0)))},
        2: [],
    },
    "two communicators, each with one half of an exchange": {
        0: [group_call(send(1), within="one"), group_call(receive(1), within="two")],
        1: [group_call(send(0), within="two"), group_call(receive(0), within="one")],
    },
}
ENDS = {
    "an exchange in one call": {0: [group_call(receive(1), send(1))], 1: [group_call(receive(0), send(0))]},
    "a call that several answer one after another": {
        0: [group_call(send(1), send(1), receive(1))],
        1: [group_call(receive(0)), group_call(receive(0)), group_call(send(0))],
    },
    "collectives and messages in one order": {
        0: [collective("all_reduce"), group_call(send(1)), collective("broadcast")],
        1: [collective("all_reduce"), group_call(receive(0)), collective("broadcast")],
    },
    "two of three, once all have met": {
        rank: [
            collective("all_reduce", members=(0, 1, 2)),
            *(Posted("world", (0, 1, 2), messages=one) for one in after),
        ]
        for rank, after in ((0, [(send(1),)]), (1, [(receive(0),)]), (2, []))
    },
    "a circle of three in one call each": {
        rank: [Posted("world", (0, 1, 2), messages=(send((rank + 1) % 3), receive((rank - 1) % 3)))]
        for rank in range(3)
    },
}
MIXED_UP = {
    "another form": {0: [group_call(send(1, "8"))], 1: [group_call(receive(0, "9"))]},
    "another tag, which NCCL does not look at": {
        0: [group_call(send(1, f"{X} tag 1"), send(1, f"{X} tag 2"))],
        1: [group_call(receive(0, f"{X} tag 2"), receive(0, f"{X} tag 1"))],
    },
    "unlike collectives": {0: [collective("all_reduce")], 1: [collective("broadcast")]},
}


@pytest.mark.parametrize("name", HANGS)
def test_a_planted_order_that_hangs_is_found(name: str) -> None:
    assert hang_of(HANGS[name]).startswith("NCCL hangs:\nrank 0: ")


@pytest.mark.parametrize("name", ENDS)
def test_an_order_that_comes_to_an_end_passes(name: str) -> None:
    assert hang_of(ENDS[name]) == ""


@pytest.mark.parametrize("name", MIXED_UP)
def test_calls_that_nccl_would_take_for_each_other_are_found(name: str) -> None:
    assert "meet" in hang_of(MIXED_UP[name])


CELLS = (
    *(Cell("llama", plan) for plan in PLANS if plan != "1 device"),
    *(Cell("mlp", plan) for plan in ("PP2 + PP1", "TP2>TP1 + 1")),
    Cell("t5", "TP2>TP1 + 1"),
    Cell("conv", "TP2 + TP1"),
)


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch, losses_in_double: None) -> dict[int, list[Posted]]:
    found: dict[int, list[Posted]] = {}
    monkeypatch.setattr(RecordingTransport, "posted", found)
    monkeypatch.setattr(threads, "ThreadTransport", RecordingTransport)
    return found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_training_posts_nothing_on_which_nccl_hangs(cell: Cell, posted: dict[int, list[Posted]]) -> None:
    check_trained(cell, trained(cell))
    assert any(call.messages or call.collective for calls in posted.values() for call in calls)
    assert hang_of(posted) == ""


@pytest.mark.parametrize("plan", ["PP2", "PP2 x TP2"])
def test_stages_that_post_messages_one_by_one_are_found(
    plan: str, posted: dict[int, list[Posted]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pipelines do whose every message is a call of its own: in 1F1B neighbours have one for each other at once."""
    right = p2p.post

    def one_by_one(
        receives: Sequence[Any], sends: Sequence[Any], table: GroupTable, group: Any = None
    ) -> p2p.PendingMessages:
        arriving = [work for message in receives for work in right([message], (), table, group).arriving]
        return p2p.PendingMessages(
            arriving, [work for message in sends for work in right((), [message], table, group).leaving]
        )

    monkeypatch.setattr("hetu_fx.switching.step.stage_p2p.post", one_by_one)
    trained(Cell("llama", plan))
    assert hang_of(posted).startswith("NCCL hangs")


def two_of_three(table: GroupTable) -> None:
    """Send a first message between two ranks, while the third has nothing to say."""
    table.connect(torch.device("cpu"))
    sends = [(1, torch.zeros(8), p2p.Tag.STAGES)] if table.rank == 0 else []
    receives = [(0, torch.zeros(8), p2p.Tag.STAGES)] if table.rank == 1 else []
    p2p.post(receives, sends, table).wait()


def test_a_first_message_waits_for_nobody_once_all_have_connected(
    posted: dict[int, list[Posted]], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads.run_in_threads(3, two_of_three)
    assert len(posted) == 3
    assert hang_of(posted) == ""
    posted.clear()
    monkeypatch.setattr(GroupTable, "connect", lambda *_: None)
    threads.run_in_threads(3, two_of_three)
    assert hang_of({2: [], **posted}).startswith("NCCL hangs:\nrank 0: sends to rank 1")


def test_the_forms_of_messages_are_compared_with_their_tags() -> None:
    one, other = send(1, "a"), replace(send(1, "a"), form="b")
    assert hang_of({0: [group_call(one)], 1: [group_call(replace(other, peer=0, is_send=False))]})
