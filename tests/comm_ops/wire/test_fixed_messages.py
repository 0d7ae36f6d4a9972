"""Messages of known sizes bring what those of `bsr_run` bring, and share memory where nothing needs to be copied."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.annotations.local import local_part
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import pack, unpack
from hetu_fx.comm_ops.wire.fixed_messages import FixedMessages
from hetu_fx.errors import CommError
from tests.oracles.annotation_samples import random_annotation

CPU = torch.device("cpu")
APART, TOGETHER = (range(4), range(4, 8)), (range(6), range(2, 8))
DTYPES = [torch.float64, torch.int16, torch.complex64]


def random_plan(random: Random, senders: range, receivers: range) -> tuple[BsrPlan, list[Tensor], list[torch.dtype]]:
    """Draw moves of one to three tensors from some ranks to others, and the whole tensors."""
    moves: list[TensorMove] = []
    wholes: list[Tensor] = []
    dtypes = [random.choice(DTYPES) for _ in range(random.randint(1, 3))]
    for dtype in dtypes:
        shape = tuple(random.choice([4, 6, 12]) for _ in range(random.randint(1, 3)))
        source, target = (random_annotation(random, ranks, shape) for ranks in (senders, receivers))
        moves.append(TensorMove(source, target, shape, dtype.itemsize))
        wholes.append(torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(len(wholes))).to(dtype))
    return plan_moves(moves), wholes, dtypes


def parts_of(plan: BsrPlan, rank: int, wholes: list[Tensor]) -> list[Tensor | None]:
    pairs = zip(plan.moves, wholes, strict=True)
    return [local_part(x, move.source, rank).clone() if move.source.holds(rank) else None for move, x in pairs]


@pytest.mark.parametrize("ranks", [APART, TOGETHER])
@pytest.mark.parametrize("seed", range(60))
def test_they_bring_what_packed_messages_bring(seed: int, ranks: tuple[range, range]) -> None:
    plan, wholes, dtypes = random_plan(Random(seed), *ranks)
    like = [torch.empty(0, dtype=dtype) for dtype in dtypes]
    before = {rank: parts_of(plan, rank, wholes) for rank in range(8)}
    all_messages = {rank: FixedMessages(plan, rank, dtypes, CPU) for rank in range(8)}
    sent = {rank: messages.leaving(before[rank]) for rank, messages in all_messages.items()}
    for rank, messages in all_messages.items():
        room = messages.room()
        for sender, message in room.items():
            message.view(-1).copy_(sent[sender][rank].view(-1))
        packed = {sender: pack(plan, sender, rank, before[sender], like) for sender in room}
        expected = unpack(plan, rank, before[rank], like, packed)
        for made, told in zip(messages.results(room, before[rank]), expected, strict=True):
            assert (made is None) == (told is None)
            assert made is None or told is None or torch.equal(made, told)


def test_what_travels_whole_is_neither_packed_nor_copied() -> None:
    plan = plan_moves([TensorMove(Annotation.on((0,)), Annotation.on((1,)), (3, 4), 8)])
    value = torch.randn(3, 4, dtype=torch.float64)
    sender, receiver = (FixedMessages(plan, rank, [torch.float64], CPU) for rank in (0, 1))
    assert sender.leaving([value])[1].data_ptr() == value.data_ptr()
    room = receiver.room()
    (made,) = receiver.results(room)
    assert made is not None
    assert made.data_ptr() == room[0].data_ptr()


def test_several_that_arrive_whole_are_views_of_one_message() -> None:
    plan = plan_moves([TensorMove(Annotation.on((0,)), Annotation.on((1,)), shape, 4) for shape in ((3,), (5, 2))])
    receiver = FixedMessages(plan, 1, [torch.float32] * 2, CPU)
    room = receiver.room()
    for made in receiver.results(room):
        assert made is not None
        assert made.untyped_storage().data_ptr() == room[0].untyped_storage().data_ptr()


def test_what_stays_is_the_piece_itself() -> None:
    plan = plan_moves([TensorMove(Annotation.on((0,)), Annotation.on((0, 1), Duplicate(2)), (4,), 4)])
    piece = torch.randn(4)
    messages = FixedMessages(plan, 0, [torch.float32], CPU)
    assert messages.results({}, [piece])[0] is piece
    assert list(messages.leaving([piece])) == [1]


def test_a_size_that_is_not_known_is_refused() -> None:
    plan = plan_moves([TensorMove(Annotation.on((0, 1), Split(1, (1, 1))), Annotation.on((2,)), (None, 4), 4)])
    with pytest.raises(CommError, match="not all known"):
        FixedMessages(plan, 2, [torch.float32], CPU)
