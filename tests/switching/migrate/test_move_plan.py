"""A change of home on paper: what it does, read off the plan with numpy, what it takes, and how it is told."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Split
from hetu_fx.errors import StateError
from hetu_fx.switching.migrate import move_plan as switch_plan
from hetu_fx.switching.migrate.buckets import ARRIVING, LEAVING, NEW, Carrier, StateTensor, peak_bytes
from hetu_fx.switching.migrate.move_plan import LEAST_EXTRA_BYTES, SwitchPlan
from tests.oracles.annotation_reference import shard
from tests.oracles.annotation_samples import random_annotation

WORLD = 5
SHAPES = [(12, 4), (6, 2, 4), (10,), (), (0, 4), (1,)]
KINDS = {"value": torch.bfloat16, "gradient": torch.bfloat16, "optimizer 0 exp_avg": torch.float32}
ROWS = Annotation.on((0, 1, 2), Split(0, (1, 2, 1)))
COLUMNS = Annotation.on((3, 0), Split(1, (1, 1)))


def plan_switch(state: Sequence[StateTensor], nodes: tuple[int, ...] = (0,) * WORLD, **options: Any) -> SwitchPlan:
    return switch_plan.plan_switch.__wrapped__(tuple(state), nodes, **options)


def random_home(random: Random, shape: tuple[int, ...]) -> Annotation:
    if not shape:
        return Annotation.replicated(random.sample(range(WORLD), random.randint(1, WORLD)))
    return random_annotation(random, range(WORLD), shape, partial=False)


def random_state(seed: int, scale: int = 1) -> list[StateTensor]:
    random = Random(seed)
    state = []
    for number in range(random.randint(1, 6)):
        shape = tuple(size * scale for size in random.choice(SHAPES))
        before, after = random_home(random, shape), random_home(random, shape)
        after = before if random.random() < 0.2 else after
        state += [StateTensor(f"p{number}", kind, dtype, before, after, shape) for kind, dtype in KINDS.items()]
    return state


def weight(number: int, shape: tuple[int, ...] = (8, 8)) -> StateTensor:
    return StateTensor(f"w{number}", "value", torch.float32, ROWS, COLUMNS, shape)


def carried_out(plan: SwitchPlan, tensor: StateTensor, whole: np.ndarray) -> dict[int, np.ndarray]:
    """Give what every rank has of a tensor afterwards, with NaN in the global tensor where it has nothing."""
    buckets = [bucket for bucket in plan.buckets if tensor in bucket.tensors]
    assert [bucket.completes for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    found = {rank: np.full(tensor.shape, np.nan) for rank in range(WORLD)}
    for bucket, transfer in [(b, transfer) for b in buckets for transfer in b.moves.transfers]:
        if bucket.tensors[transfer.move] == tensor:
            place = np.ix_(*(list(itertools.chain(*itertools.starmap(range, dim))) for dim in transfer.dims))
            had = np.full(tensor.shape, np.nan)
            for box in boxes(tensor.source, transfer.sender, tensor.shape):
                had[box] = whole[box]
            found[transfer.receiver][place] = had[place]
    return found


def boxes(annotation: Annotation, rank: int, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    if not annotation.holds(rank):
        return []
    return [tuple(itertools.starmap(slice, box.bounds)) for box in annotation.region(rank, shape).boxes]


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1))
def test_what_the_plan_sends_is_what_the_new_owners_lack(seed: int) -> None:
    state = random_state(seed)
    plan = plan_switch(state, extra_share=Random(seed).choice((0.01, 0.1, 1.0)), least_extra_bytes=0)
    for tensor in plan.tensors:
        whole = np.arange(1.0, 1.0 + math.prod(tensor.shape)).reshape(tensor.shape)
        found = carried_out(plan, tensor, whole)
        for rank in tensor.target.ranks:
            expected = np.full(tensor.shape, np.nan)
            for box in boxes(tensor.target, rank, tensor.shape):
                expected[box] = whole[box]
            wanted = ~np.isnan(expected)
            np.testing.assert_array_equal(found[rank][wanted], expected[wanted])
            assert shard(whole, tensor.target)[rank].size == wanted.sum()


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1))
def test_no_byte_too_many_travels(seed: int) -> None:
    state = random_state(seed)
    plan = plan_switch(state)
    event(f"{len(plan.buckets)} buckets")
    lacking = sum(
        tensor.dtype.itemsize * len(owned(tensor.target, rank, tensor.shape) - owned(tensor.source, rank, tensor.shape))
        for tensor in state
        for rank in range(WORLD)
    )
    assert plan.total_bytes == plan.least_bytes == lacking


def owned(annotation: Annotation, rank: int, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {
        index
        for box in boxes(annotation, rank, shape)
        for index in itertools.product(*(range(part.start, part.stop) for part in box))
    }


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_every_pair_of_ranks_has_one_message_per_bucket(seed: int) -> None:
    plan = plan_switch(random_state(seed))
    for bucket in plan.buckets:
        pairs = [(sender, receiver) for sender, receiver, _ in bucket.moves.messages]
        assert len(pairs) == len(set(pairs))
    assert {tensor.parameter for tensor in plan.tensors} <= {f"p{number}" for number in range(6)}
    assert all(tensor.source != tensor.target for tensor in plan.tensors)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.3]), st.sampled_from(Carrier))
def test_extra_memory_of_a_rank_is_a_share_of_the_state_or_one_new_part_and_a_fifth_of_that(
    seed: int, share: float, transport: Carrier
) -> None:
    state = random_state(seed, scale=32)
    plan = plan_switch(state, extra_share=share, least_extra_bytes=0, transport=transport)
    limit = share * max(plan.state_bytes)
    largest = max(tensor.part_bytes(tensor.target, rank) for tensor in state for rank in tensor.target.ranks)
    assert plan.peak_extra_bytes <= max(limit, largest + limit / 5) * 1.1 + 4096  # rows are not cut


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(Carrier))
def test_what_only_optimizers_use_comes_later_and_all_else_is_as_without(seed: int, transport: Carrier) -> None:
    state = random_state(seed, scale=16)
    whole, split = (
        plan_switch(state, least_extra_bytes=0, transport=transport, splits=splits) for splits in (False, True)
    )
    assert {tensor.kind for tensor in split.now.tensors} <= {"value", "gradient"}
    assert {tensor.kind for tensor in split.later.tensors} <= {"optimizer 0 exp_avg"}
    assert set(split.now.tensors) | set(split.later.tensors) == set(split.tensors) == set(whole.tensors)
    assert split.now.buckets + split.later.buckets == split.buckets
    assert split.now.total_bytes + split.later.total_bytes == whole.total_bytes == split.least_bytes
    assert split.peak_extra_bytes == max(split.now.peak_extra_bytes, split.later.peak_extra_bytes)
    assert split.now.transport == split.later.transport == whole.transport
    assert (whole.now.buckets, whole.later.buckets) == (whole.buckets, ())


def test_a_plan_tells_what_comes_beside_the_next_step() -> None:
    late = StateTensor("w0", "optimizer 0 exp_avg", torch.float32, ROWS, COLUMNS, (8, 8))
    plan = plan_switch([weight(0), late], splits=True)
    assert plan.to_json()["later_bytes"] == 224
    assert plan.summary().startswith("2 tensors in 2 buckets: 448 bytes, of them 224 bytes beside the next step in")


def test_a_tensor_larger_than_the_share_comes_in_parts() -> None:
    plan = plan_switch([weight(0, (1000, 1000))], extra_share=0.1, least_extra_bytes=0)
    (first, *_, last) = plan.buckets
    assert [first.completes, last.completes] == [False, True]
    assert plan.tensors == (weight(0, (1000, 1000)),)
    assert max(bucket.message_bytes() for bucket in plan.buckets) <= max(plan.state_bytes) * 0.1 / 5 / 4
    largest_part = 1000 * 500 * 4
    assert plan.peak_extra_bytes <= largest_part + max(plan.state_bytes) * 0.1 / 5
    assert plan.total_bytes == plan.least_bytes


def test_ranks_that_read_messages_where_they_are_packed_need_fewer_buckets() -> None:
    state = [weight(number) for number in range(200)]
    sent, read = (
        plan_switch(state, least_extra_bytes=0, transport=transport) for transport in (Carrier.SENT, Carrier.SHARED)
    )
    assert len(read.buckets) < len(sent.buckets) * 0.6
    assert read.peak_extra_bytes <= max(read.state_bytes) / 10
    assert read.pairs == sent.pairs


def test_what_is_read_where_it_is_takes_no_room_for_messages() -> None:
    state = [replace(weight(number), source=COLUMNS, target=ROWS) for number in range(200)]
    packed, read = (
        plan_switch(state, least_extra_bytes=0, transport=transport) for transport in (Carrier.SHARED, Carrier.DIRECT)
    )
    assert not any(num_bytes for bucket in read.buckets for (what, _), num_bytes in bucket.load.items() if what != NEW)
    assert len(read.buckets) < len(packed.buckets)
    assert read.peak_extra_bytes <= max(read.state_bytes) / 10
    assert read.pairs == packed.pairs


def test_every_slice_is_packed_or_read_and_short_runs_are_packed() -> None:
    columns, rows = (Annotation.on((0, 1), Split(dim, (1, 1))) for dim in (1, 0))
    state = [
        StateTensor(str(dim), "value", torch.float32, *homes, (64, 64))
        for dim, homes in enumerate(((columns, rows), (rows, columns)))
    ]
    plan = plan_switch(state, transport=Carrier.DIRECT)
    (bucket,) = plan.buckets
    found = [{bucket.tensors[t.move].parameter for t in part.transfers} for part in (bucket.direct, bucket.packed)]
    assert found == [{"0"}, {"1"}]
    assert bucket.load[LEAVING, 0] == 32 * 32 * 4
    assert len(bucket.direct.transfers) + len(bucket.packed.transfers) == len(bucket.moves.transfers)


def test_many_equal_tensors_move_with_a_tenth_of_the_state_beside_it() -> None:
    plan = plan_switch([weight(number) for number in range(200)], least_extra_bytes=0)
    assert plan.peak_extra_bytes <= max(plan.state_bytes) / 10
    assert len(plan.buckets) <= 80


def test_room_for_messages_is_that_of_two_buckets_and_new_parts_are_those_of_one() -> None:
    large, small = (plan_switch([weight(0, shape)]).buckets[0] for shape in ((8, 8), (4, 4)))
    # Rank 0 has a quarter of the rows and gets half of the columns, three quarters of which it lacks.
    assert large.load[NEW, 0] == 8 * 4 * 4
    assert large.load[ARRIVING, 0] == 6 * 4 * 4
    assert large.load[LEAVING, 0] == 2 * 4 * 4
    assert peak_bytes([large, small])[0] == sum(large.load[what, 0] for what in (NEW, ARRIVING, LEAVING)) + sum(
        small.load[what, 0] for what in (ARRIVING, LEAVING)
    )


def test_a_small_state_moves_in_one_bucket() -> None:
    plan = plan_switch([weight(number) for number in range(100)])
    assert len(plan.buckets) == 1
    assert plan.peak_extra_bytes <= LEAST_EXTRA_BYTES


def test_plans_do_not_depend_on_who_makes_them() -> None:
    first, second = (plan_switch(random_state(7)) for _ in range(2))
    assert first == second
    assert first.to_json() == second.to_json()


def test_senders_on_the_receivers_node_are_preferred() -> None:
    copies = StateTensor("w", "value", torch.float32, Annotation.on((0, 3), Duplicate(2)), Annotation.on((2,)), (4,))
    assert plan_switch([copies]).pairs == {(0, 2): 16}
    assert plan_switch([copies], nodes=(0, 0, 1, 1, 2)).pairs == {(3, 2): 16}


def test_what_stays_makes_no_bucket_but_counts_as_state() -> None:
    stays = StateTensor("w", "value", torch.float32, ROWS, ROWS, (8, 8))
    plan = plan_switch([stays])
    assert (plan.buckets, plan.total_bytes, plan.state_bytes) == ((), 0, (64, 128, 64, 0, 0))


def test_plans_are_told_as_a_table_and_as_json() -> None:
    plan = plan_switch([weight(0)])
    lines = str(plan).splitlines()
    assert lines[0].startswith("1 tensors in 1 buckets: 224 bytes in 5 messages (224 bytes are lacking)")
    assert lines[1].split() == ["sender", "receiver", "bytes"]
    told = json.loads(json.dumps(plan.to_json()))
    assert told["bytes"] == sum(pair["bytes"] for pair in told["pairs"]) == 224
    ((tensor,),) = told["buckets"]
    assert (tensor["parameter"], tensor["kind"], tensor["dtype"]) == ("w0", "value", "float32")
    assert {"dims": [[[0, 2]], [[0, 4]]], "sender": 0, "receiver": 3} in tensor["transfers"]


def test_a_home_of_summands_is_refused() -> None:
    with pytest.raises(StateError, match="value of 'w' cannot have summands at home"):
        StateTensor("w", "value", torch.float32, Annotation.on((0, 1), Partial(2)), ROWS, (4, 4))


def test_a_tensor_twice_and_a_share_of_nothing_are_refused() -> None:
    with pytest.raises(StateError, match="more than once"):
        plan_switch([weight(0), weight(0)])
    with pytest.raises(StateError, match="extra_share is 0"):
        plan_switch([weight(0)], extra_share=0)
