"""The bridge between home and compute parameters: values there once per step, gradients back.

What travels how is decided by `plan_bridge`; this module carries it out on one rank. Where home and compute
coincide the memory is shared and nothing moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES, BUCKETS_AT_ONCE
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.switching.bridge.plan import BridgeBucket, BridgeEntry, BridgePlan, plan_bridge
from hetu_fx.switching.bridge.run import BucketRun, Crossing, UnderWay

__all__ = ["Bridge", "BridgeBucket", "BridgeEntry", "BridgePlan", "Reduction", "plan_bridge"]


class Bridge:
    """Brings parameters from home to where they are computed with, and gradients home.

    Made alike on all ranks of `table`; every call is collective over them. `lowering` chooses the form of its messages
    (None: the cheapest on the links of `table`). `is_outdated` is set where parameters have got other homes since.
    """

    def __init__(
        self,
        entries: Sequence[BridgeEntry],
        table: GroupTable,
        bucket_bytes: int = BUCKET_BYTES,
        lowering: Lowering | None = None,
    ) -> None:
        self.plan = plan_bridge(entries, bucket_bytes)
        self.is_outdated = False
        lowering = lowering or Lowering(table.topology)
        self.table = table
        self._device, self._has_met = torch.device("cpu"), False
        by_name = {entry.name: entry for entry in entries}
        crossings = {
            name: (
                Crossing(name, entry.shape, entry.dtype, entry.home, entry.compute),
                Crossing(name, entry.shape, entry.dtype, entry.gradient, entry.home),
            )
            for name, entry in by_name.items()
        }
        self._gathers = [
            BucketRun(table, bucket, [crossings[name][0] for name in bucket.names], tag, lowering, required=True)
            for tag, bucket in enumerate(self.plan.gathers)
        ]
        self._reduces = [
            BucketRun(table, bucket, [crossings[name][1] for name in bucket.names], tag, lowering, required=False)
            for tag, bucket in enumerate(self.plan.reduces)
        ]

    @property
    def sends_gradients(self) -> bool:
        """Whether any gradient of this rank travels, or arrives."""
        return any(run.messages or run.moved for run in self._reduces)

    @property
    def reduce_buckets(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each reduce bucket, in order."""
        return tuple(bucket.names for bucket in self.plan.reduces)

    def gather(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn this rank's home pieces into its compute parameters (names that it reads only).

        Casts to the entries' dtypes. A result shares memory with its piece where they coincide. Raises
        StateError where a piece is missing, CommError where a peer is.
        """
        return self._run(len(self._gathers), lambda number: self.gather_start(number, pieces))

    def reduce(self, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Turn this rank's gradients of compute parameters into gradients of its home pieces, for all names.

        A gradient that is None or absent counts as zeros. Gradients may be written to and given back.
        """
        return self._run(len(self._reduces), lambda number: self.reduce_start(number, grads))

    def gather_start(self, number: int, pieces: Mapping[str, Tensor]) -> UnderWay:
        """Start one gather bucket; all ranks start all buckets in order."""
        with using(self.table):
            return self._gathers[number].start(pieces, self._device_of(pieces))

    def meet(self) -> None:
        """Make the process groups that gradients travel in; collective, and nothing once they are there.

        That waits for peers, which must not happen amid a pipeline's schedule: a rank that begins to send the gradient
        of a tied parameter home would wait for one that waits for its cotangents.
        """
        if not self._has_met:
            with using(self.table):
                for run in self._reduces:
                    run.meet(self._device)
            self._has_met = True

    def reduce_start(self, number: int, grads: Mapping[str, Tensor | None]) -> UnderWay:
        """Start one reduce bucket, whose gradients are ready; all ranks start all buckets in order."""
        with using(self.table):
            return self._reduces[number].start(grads, self._device_of(grads))

    def _device_of(self, tensors: Mapping[str, Tensor | None]) -> torch.device:
        """Remember where tensors are, for a rank that has none of a bucket."""
        given = next((tensor for tensor in tensors.values() if tensor is not None), None)
        if given is not None:
            self._device = given.device
        return self._device

    @staticmethod
    def _run(number: int, start: Callable[[int], UnderWay]) -> dict[str, Tensor]:
        under_way: deque[UnderWay] = deque()
        results: dict[str, Tensor] = {}
        for bucket in range(number):
            under_way.append(start(bucket))
            if len(under_way) == BUCKETS_AT_ONCE:
                results |= under_way.popleft().wait()
        for handle in under_way:
            results |= handle.wait()
        return results


class Reduction:
    """Reduces gradients as they become ready, so that their messages travel beside the rest of the backward.

    Making the first one of a bridge is collective.

    Buckets start in their fixed order, each as soon as the gradients that this rank has for it (`expected`, by
    name) are there; `start` starts what is left, `finish` waits for all.
    """

    def __init__(self, bridge: Bridge, expected: Collection[str]) -> None:
        bridge.meet()
        self._bridge = bridge
        self._ready: dict[str, Tensor | None] = {}
        self._open = [set(names) & set(expected) for names in bridge.reduce_buckets]
        self._bucket_of = {name: i for i, names in enumerate(bridge.reduce_buckets) for name in names}
        self._under_way: list[UnderWay] = []

    def ready(self, name: str, grad: Tensor | None) -> None:
        """Hand in a gradient of this step, once per parameter; it is final and belongs to the bridge now."""
        self._ready[name] = grad
        self._open[self._bucket_of[name]].discard(name)
        while len(self._under_way) < len(self._open) and not self._open[len(self._under_way)]:
            self._start_next()

    def start(self) -> None:
        """Start what is left, with zeros for gradients that never came."""
        while len(self._under_way) < len(self._open):
            self._start_next()

    def finish(self) -> dict[str, Tensor]:
        """Start what is left, wait for all, and give the gradients of the home pieces by name."""
        self.start()
        results: dict[str, Tensor] = {}
        for handle in self._under_way:
            results |= handle.wait()
        return results

    def _start_next(self) -> None:
        number = len(self._under_way)
        names = self._bridge.reduce_buckets[number]
        self._under_way.append(self._bridge.reduce_start(number, {name: self._ready.pop(name, None) for name in names}))
