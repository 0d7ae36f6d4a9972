"""Slices as runs of bytes, against plain slicing; and copying that the system stops where it likes."""

from __future__ import annotations

import math
import os
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.annotations.local import take_slice
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, TensorMove, plan_moves
from hetu_fx.comm_ops.wire.peers import system
from hetu_fx.comm_ops.wire.peers.system import Extents, copy_extents
from hetu_fx.errors import StateError
from hetu_fx.switching.migrate import byte_runs
from hetu_fx.switching.migrate.byte_runs import contiguous_runs, in_long_runs, num_runs, slice_reads
from hetu_fx.switching.migrate.migrate import take
from tests.oracles.annotation_reference import shard
from tests.oracles.annotation_samples import random_annotation

WORLD = 4
SHAPES = [(12, 4), (6, 2, 4), (10,), (), (1,), (4, 3, 1)]


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]]:
    """Draw a shape, and disjoint intervals of every dim in order."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    where = []
    for size in shape:
        bounds = sorted(draw(st.sets(st.integers(0, size), min_size=2)))
        where.append(tuple(zip(bounds[::2], bounds[1::2], strict=False)))
    return shape, where


@given(slices(), st.sampled_from([1, 2, 8]))
def test_the_runs_of_a_slice_are_its_bytes_in_order(
    drawn: tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]], itemsize: int
) -> None:
    shape, where = drawn
    dtype = {1: torch.uint8, 2: torch.int16, 8: torch.int64}[itemsize]
    whole = torch.arange(math.prod(shape)).to(dtype).view(shape)
    runs = contiguous_runs(shape, where, itemsize)
    flat = whole.reshape(-1).view(torch.uint8).numpy()
    found = np.concatenate([flat[first : first + size] for first, size in runs])
    assert found.tobytes() == take_slice(whole, where).contiguous().numpy().tobytes()
    assert num_runs(shape, where) == len(runs)


def extents_in(memory: np.ndarray, sizes: list[int]) -> Extents:
    """Cut memory into extents of the given sizes, a byte apart from each other."""
    ends = np.cumsum(np.array(sizes, dtype=np.int64) + 1)
    return np.stack([memory.ctypes.data + ends - np.array(sizes) - 1, sizes], axis=1)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.randoms(use_true_random=False), st.integers(1, 5))
def test_what_the_system_leaves_out_is_read_at_the_next_call(sizes: list[int], random: Random, most: int) -> None:
    total = sum(sizes)
    source, target = np.arange(2 * total, dtype=np.uint8), np.zeros(2 * total, dtype=np.uint8)
    sides = extents_in(source, sizes), extents_in(target, [1] * total)
    calls = []

    def some(process: int, placed: Extents, num_placed: int, taken: Extents, num_taken: int) -> int:
        assert max(num_taken, num_placed) <= most
        count = random.randint(1, min(int(taken[:, 1].sum()), int(placed[:, 1].sum())))
        calls.append((addresses(taken)[:count], addresses(placed)[:count]))
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "MOST_EXTENTS", most)
        patch.setattr(system, "_vector", lambda extents: (extents, len(extents)))
        patch.setattr(system, "_read_once", some)
        copy_extents(1, *sides)
    for side, extents in enumerate(sides):
        assert [address for call in calls for address in call[side]] == addresses(extents)


def addresses(extents: Extents) -> list[int]:
    return [first + i for first, size in extents.tolist() for i in range(size)]


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_a_plan_read_in_this_process_gives_every_rank_its_part(seed: int) -> None:
    random = Random(seed)
    shapes = [random.choice(SHAPES) for _ in range(3)]
    moves = [TensorMove(home(random, shape), home(random, shape), shape, 8) for shape in shapes]
    wholes = [torch.arange(math.prod(shape)).view(shape) + 1 for shape in shapes]
    plan = plan_moves(moves)
    old = [parts(move.source, whole) for move, whole in zip(moves, wholes, strict=True)]
    senders = np.array([[held[rank].data_ptr() if rank in held else 0 for held in old] for rank in range(WORLD)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_runs, "RUNS_AT_ONCE", random.choice((1, 8, 1 << 14)))
        check_parts(plan, wholes, senders)


def check_parts(plan: BsrPlan, wholes: list[Tensor], senders: Extents) -> None:
    for rank in range(WORLD):
        expected = [parts(move.target, whole).get(rank) for move, whole in zip(plan.moves, wholes, strict=True)]
        new = [None if part is None else torch.zeros_like(part) for part in expected]
        take(dict.fromkeys(range(WORLD), os.getpid()), slice_reads(plan, rank), senders, new)
        for move, found, wanted in zip(plan.moves, new, expected, strict=True):
            if wanted is not None and not move.stays(rank) and move.source != move.target:
                assert found is not None
                assert torch.equal(found, wanted)


def home(random: Random, shape: tuple[int, ...]) -> Annotation:
    if not shape:
        return Annotation.replicated(random.sample(range(WORLD), random.randint(1, WORLD)))
    return random_annotation(random, range(WORLD), shape, partial=False)


def parts(annotation: Annotation, whole: Tensor) -> dict[int, Tensor]:
    return {rank: torch.from_numpy(np.array(part)) for rank, part in shard(whole.numpy(), annotation).items()}


def test_rows_are_read_where_they_are_and_narrow_columns_are_packed() -> None:
    shape = (64, 8)
    rows, columns = (Annotation.on((0, 1), Split(dim, (1, 1))) for dim in (0, 1))
    for before, after, is_long in ((rows, columns, False), (columns, rows, True)):
        move = TensorMove(before, after, shape, 4)
        sent = [t for t in plan_moves([move]).transfers if t.sender != t.receiver]
        assert [in_long_runs(move, transfer) for transfer in sent] == [is_long] * 2


def test_a_process_that_is_not_there_is_told_of() -> None:
    move = TensorMove(Annotation.on((1,)), Annotation.on((0,)), (4,), 4)
    reads = [*slice_reads(plan_moves([move]), 0)]
    nobody = 2**22 + 1  # above the largest id that Linux gives
    with pytest.raises(StateError, match=f"16 bytes of rank 1 could not be read from process {nobody}"):
        take({0: os.getpid(), 1: nobody}, reads, np.array([[0], [4096]]), [torch.zeros(4)])
