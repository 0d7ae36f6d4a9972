"""Batched send-receive on the wire: carries out a BsrPlan with one message per ordered pair of ranks.

Packing and unpacking are pure functions of tensors, so a whole plan can also be run in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hetu_fx.annotations.local import take_slice, write
from hetu_fx.base.device_types import HOST
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, SliceTransfer, TensorMove
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
