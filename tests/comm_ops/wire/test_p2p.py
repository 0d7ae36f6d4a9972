"""Messages go the way that their two ends have: from where they are, or through the host in chunks that overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hetu_fx.comm_ops.plans.algorithm import parse_algorithm
from hetu_fx.comm_ops.plans.ways import STAGED, Way
from hetu_fx.comm_ops.wire import p2p
from hetu_fx.comm_ops.wire.collectives import sum_all
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.p2p import StagedArrival, StagedMessage, Tag, post
from hetu_fx.comm_ops.wire.threads import ThreadTransport, run_in_threads
from tests.comm_ops.at_once import chosen, flat
from tests.kinds import testkind
from tests.kinds.testkind import NAME, PLACE, on_testkind

HOST = torch.device("cpu")
Work = Callable[[GroupTable, torch.device], Any]


def run_on(types: list[str], work: Work) -> list[Any]:
    """Run work(table, device) as ranks of these types; return what they make."""

    def as_rank(table: GroupTable) -> Any:
        table.know_types(types)
        with using(table):
            return work(table, PLACE if types[table.rank] == NAME else HOST)

    return run_in_threads(len(types), as_rank)


def numbers(rank: int, device: torch.device, size: int = 7) -> Tensor:
    return (torch.arange(size, dtype=torch.float64) + 10 * rank).to(device)


@pytest.mark.parametrize("types", [[NAME, "cpu"], ["cpu", NAME]])
@pytest.mark.parametrize("size", [0, 1, 4, 5, 12, 13])
@on_testkind
def test_messages_both_ways_arrive_whatever_their_chunks(types: list[str], size: int) -> None:
    p2p.CHUNK_BYTES = 32  # four numbers

    def swap(table: GroupTable, device: torch.device) -> Tensor:
        peer, room = 1 - table.rank, torch.zeros(size, dtype=torch.float64, device=device)
        post([(peer, room, Tag.SLICES)], [(peer, numbers(table.rank, device, size), Tag.SLICES)], table).wait()
        assert room.device.type == device.type
        return room.cpu()

    first, second = run_on(types, swap)
    assert torch.equal(first, numbers(1, HOST, size))
    assert torch.equal(second, numbers(0, HOST, size))


@pytest.mark.parametrize("types", [[NAME, "cpu", "cpu"], ["cpu", "cpu", NAME]])
@on_testkind
def test_collectives_of_several_types_are_those_of_one(types: list[str]) -> None:
    def meet(table: GroupTable, device: torch.device) -> list[Tensor]:
        ranks, own = (0, 1, 2), numbers(table.rank, device)
        summed = own.clone()
        sum_all(Flat.over(summed), ranks).wait()
        made = [flat(ranks, table).sum(own).wait(), summed, *flat(ranks, table).gather(own, [[7]] * 3).wait()]
        made.append(flat(ranks, table).scatter([own, own * 2, own * 3]).wait())
        assert {one.device.type for one in made} == {device.type}
        return [one.cpu() for one in made]

    for found, expected in zip(run_on(types, meet), run_on(["cpu"] * 3, meet), strict=True):
        assert all(map(torch.equal, found, expected))


@on_testkind
def test_what_is_staged_follows_from_the_types_of_a_group_and_both_ends_cut_alike() -> None:
    def ask(table: GroupTable, device: torch.device) -> tuple[Any, ...]:
        others = [rank for rank in range(3) if rank != table.rank]
        return table.is_staged(device), table.is_staged(device, (1, 2)), [table.cuts(rank) for rank in others]

    assert run_on(["cpu", "cpu", NAME], ask) == [
        (False, False, [False, True]),
        (False, False, [False, True]),
        (True, True, [True, True]),
    ]


@on_testkind
def test_devices_of_one_type_among_others_talk_in_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for ranks on the host to join a group of all."""
    testkind.is_direct()
    monkeypatch.setattr(ThreadTransport, "is_native", lambda *_: True)
    members, right = [], ThreadTransport.post

    def noted(self: ThreadTransport, receives: Any, sends: Any, group: Any) -> Any:
        members.extend((x.tensor.device.type, group.ranks) for _, x, _ in (*receives, *sends))
        return right(self, receives, sends, group)

    def swap(table: GroupTable, device: torch.device) -> Tensor:
        (source, to), room = (
            ((table.rank + step) % 3 for step in (-1, 1)),
            torch.zeros(7, dtype=torch.float64).to(device),
        )
        post([(source, room, Tag.SLICES)], [(to, numbers(table.rank, device), Tag.SLICES)], table).wait()
        return room.cpu()

    monkeypatch.setattr(ThreadTransport, "post", noted)
    found = run_on([NAME, NAME, "cpu"], swap)
    assert all(torch.equal(room, numbers((rank - 1) % 3, HOST)) for rank, room in enumerate(found))
    assert set(members) == {(NAME, (0, 1)), ("cpu", (0, 1, 2))}


@on_testkind
def test_ranks_that_nobody_has_told_of_are_taken_to_be_alike() -> None:
    def ask(table: GroupTable) -> tuple[bool, bool]:
        return table.is_staged(HOST), table.cuts(1 - table.rank)

    assert run_in_threads(2, ask) == [(False, False)] * 2


class Later:
    """A chunk that arrives when it is waited for."""

    def __init__(self, told: list[str], number: int, room: Tensor) -> None:
        self.told, self.number, self.room = told, number, room

    def wait(self) -> None:
        self.told.append(f"chunk {self.number} arrives")
        self.room.fill_(self.number + 1)

    def is_completed(self) -> bool:
        return f"chunk {self.number} arrives" in self.told


@on_testkind
def test_a_chunk_goes_on_to_the_device_before_the_next_is_waited_for() -> None:
    p2p.CHUNK_BYTES, told = 4, []
    value = torch.zeros(10, dtype=torch.uint8, device=PLACE)
    message = StagedMessage.of(Flat.over(value))

    class Seen(Later):
        def wait(self) -> None:
            told.append(f"{int(value.sum())} there")
            super().wait()

    works = [Seen(told, number, room) for number, room in enumerate(message.arriving())]
    arrival = StagedArrival(message, works)
    assert not arrival.is_completed()
    arrival.wait()
    assert arrival.is_completed()
    assert told[::2] == ["0 there", "4 there", "12 there"]
    assert value.tolist() == [1] * 4 + [2] * 4 + [3] * 2


@on_testkind
def test_a_chunk_is_copied_from_the_device_when_it_is_asked_for() -> None:
    p2p.CHUNK_BYTES = 4
    value = torch.zeros(8, dtype=torch.uint8, device=PLACE)
    leaving = StagedMessage.of(Flat.over(value)).leaving()
    first = next(leaving)
    value.fill_(7)
    assert (first.tolist(), next(leaving).tolist()) == ([0] * 4, [7] * 4)


@pytest.mark.parametrize(
    ("size", "chunks"), [(0, 1), (1 << 10, 1), (1 << 18, 1), (1 << 20, 4), (1 << 22, 16), (1 << 24, 16), (1 << 26, 64)]
)
def test_small_messages_have_small_chunks_and_large_ones_many(size: int, chunks: int) -> None:
    assert len(StagedMessage.of(Flat(torch.empty(size, dtype=torch.uint8))).arriving()) == chunks


def test_a_message_of_the_host_is_sent_from_its_own_memory() -> None:
    value = torch.arange(6.0)
    message = StagedMessage.of(Flat.over(value))
    assert next(message.leaving()).data_ptr() == value.data_ptr()


TYPES = [NAME, NAME, NAME, "cpu", "cpu"]
BY_TYPE = parse_algorithm("nodes 0,0,0,1,1 from 0")
RANKS = tuple(range(len(TYPES)))


def parts_of(rank: int, device: torch.device) -> list[Tensor]:
    return [numbers(rank + other, device, 3 + other) for other in RANKS]


Collective = Callable[[GroupTable, torch.device], list[Tensor]]
COMPOSED: dict[str, tuple[Collective, Collective]] = {
    "all_reduce": (
        lambda table, device: [chosen(RANKS, BY_TYPE, table).sum(numbers(table.rank, device)).wait()],
        lambda table, device: [flat(RANKS, table).sum(numbers(table.rank, device)).wait()],
    ),
    "all_gather": (
        lambda table, device: chosen(RANKS, BY_TYPE, table).gather(numbers(table.rank, device), [[7]] * 5).wait(),
        lambda table, device: flat(RANKS, table).gather(numbers(table.rank, device), [[7]] * 5).wait(),
    ),
    "reduce_scatter": (
        lambda table, device: [chosen(RANKS, BY_TYPE, table).scatter(parts_of(table.rank, device)).wait()],
        lambda table, device: [flat(RANKS, table).scatter(parts_of(table.rank, device)).wait()],
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
@on_testkind
def test_a_group_of_several_types_meets_inside_each_and_across(name: str) -> None:
    """Inside, from where tensors are; across, through the host."""
    testkind.is_direct()
    composed, flat = COMPOSED[name]
    seen: list[tuple[tuple[int, ...], str]] = []
    meet = ThreadTransport._meet

    def noted(self: ThreadTransport, group: Any, call: Any, brings: Any, *rest: Any) -> Any:
        first = next(leaf for leaf in pytree.tree_leaves(brings) if isinstance(leaf, Tensor | Flat))
        seen.append((group.ranks, (first.tensor if isinstance(first, Flat) else first).device.type))
        return meet(self, group, call, brings, *rest)

    ThreadTransport._meet = noted  # type: ignore[method-assign]
    found = run_on(TYPES, lambda table, device: [one.cpu() for one in composed(table, device)])
    direct = {ranks for ranks, device in seen if device == NAME}
    assert direct == {(0, 1, 2)}
    assert all(len({TYPES[rank] for rank in ranks}) > 1 for ranks, device in seen if ranks not in ((0, 1, 2), (3, 4)))
    expected = run_on(["cpu"] * 5, lambda table, device: flat(table, device))
    assert all(all(map(torch.equal, *pair)) for pair in zip(found, expected, strict=True))


@on_testkind
def test_what_is_known_to_be_quicker_over_the_host_goes_there_and_arrives() -> None:
    testkind.is_direct()
    seen: set[str] = set()
    post_of = ThreadTransport.post

    def noted(self: ThreadTransport, receives: Any, sends: Any, group: Any) -> Any:
        seen.update(x.tensor.device.type for _, x, _ in (*receives, *sends))
        return post_of(self, receives, sends, group)

    def meet(table: GroupTable, device: torch.device) -> list[Tensor]:
        detours = [Way(STAGED, (NAME, NAME), "inter", 1e9)]
        table.set_links(detours, ["a", "b"])
        peer, room = 1 - table.rank, torch.zeros(7, dtype=torch.float64, device=device)
        post([(peer, room, Tag.SLICES)], [(peer, numbers(table.rank, device), Tag.SLICES)], table).wait()
        return [room.cpu(), flat((0, 1), table).sum(numbers(table.rank, device)).wait().cpu()]

    ThreadTransport.post = noted  # type: ignore[method-assign]
    found = run_on([NAME, NAME], meet)
    assert seen == {"cpu"}
    total = numbers(0, HOST) + numbers(1, HOST)
    assert [[one.tolist() for one in both] for both in found] == [
        [numbers(1 - rank, HOST).tolist(), total.tolist()] for rank in (0, 1)
    ]


@pytest.mark.parametrize("size", [9, 300_000])
@on_testkind
def test_a_sum_over_several_types_has_the_same_bits_however_large(size: int) -> None:
    """Large ones are summed part by part."""

    def meet(table: GroupTable, device: torch.device) -> Tensor:
        return flat((0, 1, 2), table).sum(numbers(table.rank, device, size)).wait().cpu()

    found = run_on([NAME, "cpu", NAME], meet)
    expected = sum(numbers(rank, HOST, size) for rank in range(3))
    assert all(torch.equal(one, expected) for one in found)


@on_testkind
def test_what_goes_to_several_ranks_is_brought_to_the_host_once() -> None:
    def meet(table: GroupTable, device: torch.device) -> int:
        own = numbers(table.rank, device)
        before = testkind.calls["aten::_copy_from"]
        flat((0, 1, 2, 3), table).gather(own, [[7]] * 4).wait()
        return testkind.calls["aten::_copy_from"] - before

    copies = run_on([NAME, "cpu", "cpu", "cpu"], meet)[0]
    assert copies == 1 + 3, "to the host, and from it one of each other rank"


@on_testkind
def test_ranks_of_one_type_send_from_where_they_are_and_others_through_the_host_in_one_call() -> None:
    testkind.is_direct()

    def swap(table: GroupTable, device: torch.device) -> list[float]:
        others = [rank for rank in range(3) if rank != table.rank]
        rooms = [torch.zeros(7, dtype=torch.float64, device=device) for _ in others]
        arriving = [(rank, room, Tag.SLICES) for rank, room in zip(others, rooms, strict=True)]
        leaving = [(rank, numbers(table.rank, device), Tag.SLICES) for rank in others]
        post(arriving, leaving, table).wait()
        return [float(room.sum()) for room in rooms]

    sums = [float(numbers(rank, HOST).sum()) for rank in range(3)]
    found = run_on([NAME, "cpu", NAME], swap)
    assert found == [[sums[1], sums[2]], [sums[0], sums[2]], [sums[0], sums[1]]]
