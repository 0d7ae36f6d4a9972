"""Batched send-receive on the wire: carries out a BsrPlan with one message per ordered pair of ranks.

Packing and unpacking are pure functions of tensors, so a whole plan can also be run in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.local import take_slice, write
from hetu_fx.base.device_types import HOST
from hetu_fx.comm_ops.plans.algorithm import FLAT, Algorithm
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, SliceTransfer, TensorMove
from hetu_fx.comm_ops.plans.choose_algorithm import ChooseAlgorithm, number_nodes
from hetu_fx.comm_ops.plans.cost import Topology
from hetu_fx.comm_ops.plans.routes import SliceGroup, collectives_of_rank, slice_groups
from hetu_fx.comm_ops.plans.slices import Dims
from hetu_fx.comm_ops.plans.transition import Transition, parse_transition
from hetu_fx.comm_ops.wire.algorithms import Collectives
from hetu_fx.comm_ops.wire.bsr_messages import Messages, Rooms, post
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.packing import (
    check_local,
    local_dims,
    local_shape_like,
    packed_bytes,
    slice_shape,
    view_message,
)
from hetu_fx.errors import CommError


def run_moves(
    plan: BsrPlan,
    tensors: Sequence[Tensor | None],
    table: GroupTable,
    *,
    like: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:
    """Carry out a plan: dense local tensors per move in, dense local tensors out.

    A result is a new tensor, but where this rank's part stays as it is: there it is the tensor passed in.

    Collective over the ranks that the plan's messages name; a rank that neither sends nor receives waits for
    nobody. `tensors[i]` is None where this rank holds nothing of move i before, the result where it holds
    nothing after. Where it holds something only after, `like[i]` gives dtype and device. Raises CommError
    where a peer is dead or late, or a tensor has another shape than the plan says.
    """
    examples = example_slices(plan, tensors, like, table.rank)
    results = list(tensors)
    for part in plan.rounds:
        messages = exchange(part, table, examples, results)
        results = unpack(part, table.rank, results, examples, messages)
    return results


def pack(
    plan: BsrPlan,
    rank: int,
    receiver: int,
    tensors: Sequence[Tensor | None],
    examples: Sequence[Tensor],
    message: Tensor | None = None,
) -> Tensor:
    """Make the message (flat bytes) from `rank` to `receiver`, in `message` if that is given."""
    transfers = plan.outgoing[rank][receiver]
    if message is None:
        message = examples[transfers[0].move].new_empty(message_bytes(plan, transfers, examples), dtype=torch.uint8)
    for transfer, place in _places(plan, transfers, examples, message):
        place.copy_(_read(plan, rank, transfer, tensors))
    return message


def unpack(
    plan: BsrPlan,
    rank: int,
    tensors: Sequence[Tensor | None],
    examples: Sequence[Tensor],
    messages: Mapping[int, Tensor],
    results: Sequence[Tensor | None] | None = None,
) -> list[Tensor | None]:
    """Put one round's results together from this rank's own slices and the messages by sender.

    Where this rank's part stays as it is, the result is the tensor itself. `results` are those of a call for an
    earlier part of the same moves; they are filled further.
    """
    results = new_results(plan, rank, tensors, examples) if results is None else list(results)
    incoming = plan.incoming.get(rank, ())
    places = {
        sender: _places(plan, [t for t in incoming if t.sender == sender], examples, message)
        for sender, message in messages.items()
    }
    for transfer in incoming:
        local = transfer.sender == rank
        if local and results[transfer.move] is tensors[transfer.move]:
            continue
        value = _read(plan, rank, transfer, tensors) if local else next(places[transfer.sender])[1]
        _write(plan, rank, transfer, results, value)
    return results


def new_results(
    plan: BsrPlan, rank: int, tensors: Sequence[Tensor | None], examples: Sequence[Tensor]
) -> list[Tensor | None]:
    """Make room for every move's result; where this rank's part stays as it is, that is the tensor itself."""
    return [
        tensor if plan.moves[number].stays(rank) else _allocate(plan.moves[number], rank, example)
        for number, (tensor, example) in enumerate(zip(tensors, examples, strict=True))
    ]


def exchange(
    plan: BsrPlan, table: GroupTable, examples: Sequence[Tensor], tensors: Sequence[Tensor | None]
) -> dict[int, Tensor]:
    """Send this rank's messages and give those it gets, by sender."""
    rank = table.rank
    if not plan.outgoing.get(rank) and all(t.sender == rank for t in plan.incoming.get(rank, ())):
        return {}
    return post(prepare(plan, table, examples, tensors), table).wait()


def prepare(
    plan: BsrPlan,
    table: GroupTable,
    examples: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    rooms: Rooms | None = None,
) -> Messages:
    """Pack what this rank sends, and make room for what it gets, in `rooms` if given; talks to nobody.

    In `rooms`, messages that are staged stand in host memory, where other processes may read them.
    """
    rank = table.rank
    senders: dict[int, list[SliceTransfer]] = {}
    for transfer in plan.incoming.get(rank, ()):
        if transfer.sender != rank:
            senders.setdefault(transfer.sender, []).append(transfer)
    receivers = plan.outgoing.get(rank, {})
    device = _device(plan, rank, examples)
    host = HOST if rooms is not None and table.is_staged(device) else device
    rooms = rooms or Rooms()
    arriving = rooms.arriving.take(_sizes(plan, senders, examples), host)
    leaving = rooms.leaving.take(_sizes(plan, receivers, examples), host)
    for peer, message in leaving.items():
        if host == device:
            pack(plan, rank, peer, tensors, examples, message)
        else:
            message.copy_(pack(plan, rank, peer, tensors, examples))
    return Messages(arriving, leaving, device)


def _sizes(plan: BsrPlan, peers: Mapping[int, Sequence[SliceTransfer]], examples: Sequence[Tensor]) -> dict[int, int]:
    return {peer: message_bytes(plan, transfers, examples) for peer, transfers in sorted(peers.items())}


def _device(plan: BsrPlan, rank: int, examples: Sequence[Tensor]) -> torch.device:
    moves = [t.move for t in plan.incoming.get(rank, ())]
    moves += [t.move for peers in plan.outgoing.get(rank, {}).values() for t in peers]
    return examples[moves[0]].device if moves else torch.device("cpu")


def example_slices(
    plan: BsrPlan, tensors: Sequence[Tensor | None], like: Sequence[Tensor] | None, rank: int
) -> list[Tensor]:
    """Return for every move a tensor of its dtype and device. Raises CommError where a tensor is missing or misfit."""
    if len(tensors) != len(plan.moves):
        raise CommError(f"a plan of {len(plan.moves)} moves needs as many tensors, got {len(tensors)}")
    examples = []
    for number, (move, tensor) in enumerate(zip(plan.moves, tensors, strict=True)):
        if tensor is None and move.source.holds(rank):
            raise CommError(f"move {number} needs rank {rank}'s part of {move.source}, got None")
        if tensor is None and like is None and move.target.holds(rank):
            raise CommError(f"move {number} is new to rank {rank}: pass like= to tell its dtype and device")
        if tensor is not None and move.source.holds(rank):
            check_local(tensor, move.source, rank, move.shape, f"move {number}")
        examples.append(tensor if tensor is not None else like[number] if like else torch.empty(0))
    return examples


def message_bytes(plan: BsrPlan, transfers: Sequence[SliceTransfer], examples: Sequence[Tensor]) -> int:
    """Count the bytes of one message, padding between its slices included."""
    return sum(
        packed_bytes(_shape(plan, transfer, examples), examples[transfer.move].element_size()) for transfer in transfers
    )


def _places(
    plan: BsrPlan, transfers: Sequence[SliceTransfer], examples: Sequence[Tensor], message: Tensor
) -> Iterator[tuple[SliceTransfer, Tensor]]:
    offset = 0
    for transfer in transfers:
        shape, example = _shape(plan, transfer, examples), examples[transfer.move]
        yield transfer, view_message(message, offset, shape, example.dtype)
        offset += packed_bytes(shape, example.element_size())


def _shape(plan: BsrPlan, transfer: SliceTransfer, examples: Sequence[Tensor]) -> list[int]:
    return slice_shape(transfer.dims, plan.moves[transfer.move].shape, examples[transfer.move])


def _read(plan: BsrPlan, rank: int, transfer: SliceTransfer, tensors: Sequence[Tensor | None]) -> Tensor:
    move, tensor = plan.moves[transfer.move], tensors[transfer.move]
    if tensor is None:
        raise CommError(f"rank {rank} must send part of move {transfer.move}, but got no tensor for it")
    return take_slice(tensor.detach(), local_dims(move.source, rank, move.shape, transfer.dims))


def _write(plan: BsrPlan, rank: int, transfer: SliceTransfer, results: Sequence[Tensor | None], value: Tensor) -> None:
    move, result = plan.moves[transfer.move], results[transfer.move]
    if result is not None:
        write(result, local_dims(move.target, rank, move.shape, transfer.dims), value, adds=transfer.adds)


def _allocate(move: TensorMove, rank: int, example: Tensor) -> Tensor | None:
    if not move.target.holds(rank):
        return None
    shape = local_shape_like(move.target, rank, move.shape, example)
    # A target summand other than the first gets nothing and is zero.
    summand = move.target.region(rank, move.shape).summand
    return example.new_zeros(shape) if summand else example.new_empty(shape)


def reduce_slices(x: Tensor, transition: Transition, algorithm: Algorithm, table: GroupTable) -> Tensor:
    """Sum over the groups of a union: partial top to duplicate top."""
    check_local(x, transition.source, table.rank, transition.shape, "a split collective")
    result = result_like(x, transition, table.rank)
    for group in collectives_of_rank(transition, table.rank):
        # Read from x, not from result: a rank may be in several groups for one slice.
        summand = take(x, transition.source, transition, group.parts[0], table.rank)
        total = _within(group, transition, algorithm, table).sum(summand).wait()
        write_slices(result, transition.target, transition, group.parts[0], table.rank, total)
    return result


def gather_slices(x: Tensor, transition: Transition, algorithm: Algorithm, table: GroupTable) -> Tensor:
    """Join over the groups of a union: split top to duplicate top."""
    check_local(x, transition.source, table.rank, transition.shape, "a split collective")
    result = result_like(x, transition, table.rank)
    for group in collectives_of_rank(transition, table.rank):
        shapes = [[_numel(part, transition, x)] for part in group.parts]
        flat = take(x, transition.source, transition, _own_part(group, table.rank), table.rank)
        flats = _within(group, transition, algorithm, table).gather(flat, shapes).wait()
        for flat, part in zip(flats, group.parts, strict=True):
            write_slices(result, transition.target, transition, part, table.rank, flat)
    return result


def scatter_slices(x: Tensor, transition: Transition, algorithm: Algorithm, table: GroupTable) -> Tensor:
    """Sum over the groups of a union, each keeping its part: partial top to split top."""
    check_local(x, transition.source, table.rank, transition.shape, "a split collective")
    result = result_like(x, transition, table.rank)
    for group in collectives_of_rank(transition, table.rank):
        flats = [take(x, transition.source, transition, part, table.rank) for part in group.parts]
        total = _within(group, transition, algorithm, table).scatter(flats).wait()
        write_slices(result, transition.target, transition, _own_part(group, table.rank), table.rank, total)
    return result


def _within(group: SliceGroup, transition: Transition, algorithm: Algorithm, table: GroupTable) -> Collectives:
    within = algorithm.within(transition.ranks, group.ranks)
    return Collectives(group.ranks, within, table, is_async=False)


def algorithm_of_slices(of_group: ChooseAlgorithm) -> ChooseAlgorithm:
    """Return the choice of a split collective's algorithm: that of its largest group that gains from two levels."""

    def choose(args: Sequence[Any], topology: Topology, choice: str) -> Algorithm:
        transition = parse_transition(args[0])
        algorithms = [(group, of_group((group.ranks,), topology, choice)) for group in slice_groups(transition)]
        bounds = [
            (group.numel, algorithm.two_level_from)
            for group, algorithm in algorithms
            if algorithm.two_level_from is not None
        ]
        if not bounds:
            return FLAT
        return Algorithm(number_nodes(transition.ranks, topology), max(bounds)[1])

    return choose


def _own_part(group: SliceGroup, rank: int) -> tuple[Dims, ...]:
    """Return the slices of `rank` in a group."""
    return group.parts[group.ranks.index(rank)]


def result_like(x: Tensor, transition: Transition, rank: int) -> Tensor:
    """Return an empty tensor for this rank's part after the change."""
    return x.new_empty(local_shape_like(transition.target, rank, transition.shape, x))


def take(x: Tensor, annotation: Annotation, transition: Transition, part: Sequence[Dims], rank: int) -> Tensor:
    """Lay slices of a local tensor end to end."""
    flats = [take_slice(x.detach(), local_dims(annotation, rank, transition.shape, dims)).reshape(-1) for dims in part]
    return torch.cat(flats) if flats else x.new_empty(0)


def write_slices(
    x: Tensor, annotation: Annotation, transition: Transition, part: Sequence[Dims], rank: int, flat: Tensor
) -> None:
    """Write slices that lie end to end into a local tensor."""
    offset = 0
    for dims in part:
        shape = slice_shape(dims, transition.shape, x)
        value = flat.narrow(0, offset, torch.Size(shape).numel()).view(shape)
        write(x, local_dims(annotation, rank, transition.shape, dims), value)
        offset += value.numel()


def _numel(part: Sequence[Dims], transition: Transition, like: Tensor) -> int:
    return sum(torch.Size(slice_shape(dims, transition.shape, like)).numel() for dims in part)
