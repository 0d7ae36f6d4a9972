"""Values between the stages of a pipeline: forward to later stages, cotangents back.

Where the later stage stands on another node and several of its ranks want the same, each gets a share over the link
between the nodes and passes it on inside its own (H2's slice-send then gather), if that is cheaper on the links.

Sends do not wait (gloo's send ends only when its receive is posted, and neighbours that both send first would wait
for each other); receives do. `finish` waits for the sends of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hetu_fx.annotations.annotation import cotangent
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, TensorMove, plan_on_links
from hetu_fx.comm_ops.wire.bsr_messages import Sending, post
from hetu_fx.comm_ops.wire.bsr_run import exchange, prepare, unpack
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.p2p import Tag
from hetu_fx.program.sizes import Bindings, evaluate
from hetu_fx.transforms.specialize.device_graph import Handover

Shapes = tuple[tuple[int, ...], ...]


class Channel:
    """All that goes from one stage to another; both ends have one, and call its two halves alike.

    `device` is where this rank computes; the other end may do so on one of another kind.
    """

    def __init__(self, handovers: Sequence[Handover], table: GroupTable, device: torch.device) -> None:
        self.handovers, self._device = tuple(handovers), device
        self.names = tuple(handover.value.name for handover in handovers)
        self.returning = tuple(handover for handover in handovers if handover.value.differentiable)
        self.returned = tuple(handover.value.name for handover in self.returning)
        self._table = table
        self._forward_plan = lru_cache(maxsize=512)(self._plan_forward)
        self._backward_plan = lru_cache(maxsize=512)(self._plan_backward)
        self._in_flight: list[Sending] = []

    def send(self, values: Sequence[Tensor], bindings: Bindings) -> None:
        """Start sending this rank's pieces of the values forward."""
        self._post(self._forward(bindings), values)

    def receive(self, bindings: Bindings) -> list[Tensor]:
        """Return this rank's pieces of the values, from the earlier stage."""
        return self._fetch(self._forward(bindings), self.handovers)

    def send_back(self, cotangents: Sequence[Tensor], bindings: Bindings) -> None:
        """Start sending this rank's pieces of the cotangents back."""
        self._post(self._backward(bindings), cotangents)

    def receive_back(self, bindings: Bindings) -> list[Tensor]:
        """Return this rank's pieces of the cotangents, from the later stage."""
        return self._fetch(self._backward(bindings), self.returning)

    def finish(self) -> None:
        """Wait until everything that was sent has been taken."""
        in_flight, self._in_flight = self._in_flight, []
        for sending in in_flight:
            sending.wait()

    def _forward(self, bindings: Bindings) -> BsrPlan:
        return self._forward_plan(_shapes(self.handovers, bindings))

    def _backward(self, bindings: Bindings) -> BsrPlan:
        return self._backward_plan(_shapes(self.returning, bindings))

    def _plan_forward(self, shapes: Shapes) -> BsrPlan:
        return plan_on_links(_forward_moves(self.handovers, shapes), self._table.topology)

    def _plan_backward(self, shapes: Shapes) -> BsrPlan:
        return plan_on_links(_backward_moves(self.returning, shapes), self._table.topology)

    def _post(self, plan: BsrPlan, tensors: Sequence[Tensor]) -> None:
        pieces = [tensor.detach() for tensor in tensors]
        self._in_flight.append(post(prepare(plan, self._table, pieces, pieces), self._table, Tag.STAGES))

    def _fetch(self, plan: BsrPlan, handovers: Sequence[Handover]) -> list[Tensor]:
        rank, table = self._table.rank, self._table
        like = [torch.empty(0, dtype=handover.value.dtype, device=self._device) for handover in handovers]
        nothing = [None] * len(handovers)
        messages = post(prepare(plan, table, like, nothing), table, Tag.STAGES).wait()
        pieces = unpack(plan, rank, nothing, like, messages)
        if plan.relay is not None:
            # Only ranks of this stage meet here, and all of them do.
            pieces = unpack(plan.relay, rank, pieces, like, exchange(plan.relay, table, like, pieces))
        return [piece for piece in pieces if piece is not None]


def channels(handovers: Sequence[Handover], table: GroupTable, device: torch.device) -> tuple[Channel, ...]:
    """Return one channel for each pair of stages."""
    pairs = sorted({(handover.source, handover.target) for handover in handovers})
    return tuple(Channel([h for h in handovers if (h.source, h.target) == pair], table, device) for pair in pairs)


def _shapes(handovers: Sequence[Handover], bindings: Bindings) -> Shapes:
    return tuple(evaluate(handover.value.shape, bindings) for handover in handovers)


def _forward_moves(handovers: Sequence[Handover], shapes: Shapes) -> list[TensorMove]:
    return [
        TensorMove(h.value.annotation, h.target_annotation, shape, h.value.dtype.itemsize)
        for h, shape in zip(handovers, shapes, strict=True)
    ]


def _backward_moves(handovers: Sequence[Handover], shapes: Shapes) -> list[TensorMove]:
    return [
        TensorMove(h.target_annotation, cotangent(h.value.annotation), shape, h.value.dtype.itemsize)
        for h, shape in zip(handovers, shapes, strict=True)
    ]
