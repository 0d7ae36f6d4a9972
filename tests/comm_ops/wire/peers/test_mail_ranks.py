"""Messages that are taken where they stand: in order, into their rooms, and kept until they have been taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.p2p import Message, Tag, post
from hetu_fx.comm_ops.wire.peers import mail, memory
from hetu_fx.comm_ops.wire.peers.mail import open_mail
from hetu_fx.errors import CommError

WORLD = 3
SIZES = (5000, 3, 1, 20000, 0)


def opened(name: str) -> GroupTable:
    table = GroupTable(name=name)
    open_mail(table)
    assert table.mail is not None
    return table


def value(source: int, number: int) -> torch.Tensor:
    return torch.full((SIZES[number % len(SIZES)],), float(100 * source + number))


def check_messages_of_all_sizes_arrive_in_order(rank: int, world: int, folder: Path) -> None:
    table, rooms = opened("sizes"), []
    others = [other for other in range(world) if other != rank]
    for number in range(len(SIZES)):
        sends: list[Message] = [(other, value(rank, number), Tag.STAGES) for other in others]
        receives: list[Message] = [(other, torch.empty(SIZES[number]), Tag.STAGES) for other in others]
        rooms.append((receives, post(receives, sends, table)))
    for _, posted in rooms:
        posted.wait()
    for number, (receives, _) in enumerate(rooms):
        for other, room, _ in receives:
            assert torch.equal(room, value(other, number))


def check_more_messages_than_a_ring_holds_are_taken_one_by_one(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mail, "RING", 3)
        table = opened("ring")
        if rank == 0:
            posted = [post((), [(1, torch.full((5000,), float(i)), Tag.STAGES)], table) for i in range(10)]
            for one in posted:
                one.leave()
        if rank == 1:
            for i in range(10):
                room = torch.empty(5000)
                post([(0, room, Tag.STAGES)], (), table).arrive()
                assert torch.equal(room, torch.full((5000,), float(i)))


def check_what_is_sent_is_read_when_it_is_taken(rank: int, world: int, folder: Path) -> None:
    table = opened("late")
    if rank == 0:
        x = torch.zeros(5000)
        posted = post((), [(1, x, Tag.STAGES)], table)
        x.fill_(1.0)  # which shows that nothing was copied: no stage does so
        torch.distributed.barrier()
        posted.leave()
        return
    torch.distributed.barrier()
    if rank == 1:
        room = torch.empty(5000)
        post([(0, room, Tag.STAGES)], (), table).arrive()
        assert room.eq(1.0).all()


def check_rows_and_hand_overs_take_their_turns(rank: int, world: int, folder: Path) -> None:
    table = opened("turns")
    assert table.mail is not None
    to, source, tags = (rank + 1) % world, (rank - 1) % world, (Tag.ROWS, Tag.STAGES, Tag.ROWS)
    rooms = [torch.empty(SIZES[number]) for number in range(len(tags))]
    posted = [
        post([(source, room, tag)], [(to, value(rank, number), tag)], table)
        for number, (room, tag) in enumerate(zip(rooms, tags, strict=True))
    ]
    for one in posted:
        one.wait()
    assert all(torch.equal(room, value(source, number)) for number, room in enumerate(rooms))
    assert table.mail.sent[to] == table.mail.taken[source] == len(tags)  # type: ignore[attr-defined]


def check_other_messages_are_sent(rank: int, world: int, folder: Path) -> None:
    table = opened("others")
    assert table.mail is not None
    before = (dict(table.mail.sent), dict(table.mail.taken))  # type: ignore[attr-defined]
    to, source = (rank + 1) % world, (rank - 1) % world
    room = torch.empty(5000)
    post([(source, room, Tag.SLICES)], [(to, value(rank, 0), Tag.SLICES)], table).wait()
    assert torch.equal(room, value(source, 0))
    assert before == (dict(table.mail.sent), dict(table.mail.taken))  # type: ignore[attr-defined]


def check_ranks_of_other_networks_send(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "network_name", lambda: f"network {min(rank, 1)}")
        table = opened("networks")
    x = torch.empty(5000)
    assert table.mail is not None
    assert [table.mail.takes(other, Flat(x), Tag.STAGES) for other in range(world)] == [
        (other == 0) == (rank == 0) for other in range(world)
    ]


def check_a_message_of_another_size_is_refused(rank: int, world: int, folder: Path) -> None:
    table = opened("size")
    if rank == 0:
        post((), [(1, torch.zeros(5000), Tag.STAGES)], table)
    if rank == 1:
        with pytest.raises(CommError, match="20000 bytes where 24000"):
            post([(0, torch.zeros(6000), Tag.STAGES)], (), table).arrive()
    torch.distributed.barrier()  # or what is sent might be gone


def check_strided_messages_are_refused(rank: int, world: int, folder: Path) -> None:
    table = opened("strided")
    if rank == 0:
        with pytest.raises(CommError, match=r"flat, dense .* strides \(1, 200\)"):
            post((), [(1, torch.zeros(100, 200).t(), Tag.STAGES)], table)


@pytest.mark.distributed
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
