"""A change of the parameters' home on paper: what travels from whom to whom, in which order, and what that takes.

Values, gradients and optimizer state of a parameter lie alike, so they travel alike; `plan_moves` chooses their
senders together. Buckets are carried out one after the other, each in one message per pair of ranks, so that a rank
needs little memory beside its state (Malleus moves its state in ten rounds for that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hetu_fx.base.words import bytes_text
from hetu_fx.comm_ops.plans.bsr_plan import plan_moves
from hetu_fx.errors import StateError
from hetu_fx.show.table import table_text
from hetu_fx.switching.migrate.buckets import Carrier, StateTensor, SwitchBucket, fill_buckets, peak_bytes

FORMAT = "hetu_fx.switch/1"
EXTRA_SHARE = 0.1
"""What a change of home may take beside the state, as a part of what the rank that holds most has of it."""

LEAST_EXTRA_BYTES = 32 * 2**20
"""What it may take however small the state is: messages of some kilobytes wait longer than they travel."""


@dataclass(frozen=True)
class SwitchPlan:
    """A whole change of home; pure data, the same on every rank.

    Attributes:
        buckets: carried out one after the other.
        state_bytes: what each rank holds of the state, before or after, whichever is more.
        transport: how slices get from rank to rank.
        num_now: so many buckets come before training goes on, the others beside the next step. None: all of them.
    """

    buckets: tuple[SwitchBucket, ...]
    state_bytes: tuple[int, ...]
    transport: Carrier = Carrier.SENT
    num_now: int | None = None

    @property
    def now(self) -> SwitchPlan:
        """Return what comes before training goes on."""
        return replace(self, buckets=self.buckets[: self.num_now], num_now=None)

    @property
    def later(self) -> SwitchPlan:
        """Return what comes beside the next step."""
        return replace(self, buckets=self.buckets[len(self.now.buckets) :], num_now=None)

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """List the tensors that change their home."""
        return tuple(tensor for bucket in self.buckets if bucket.completes for tensor in bucket.tensors)

    @property
    def pairs(self) -> Mapping[tuple[int, int], int]:
        """Return the bytes that travel from each sender to each receiver."""
        pairs: Counter[tuple[int, int]] = Counter()
        for sender, receiver, num_bytes in self._messages():
            pairs[sender, receiver] += num_bytes
        return dict(sorted(pairs.items()))

    @property
    def num_messages(self) -> int:
        """Return the number of messages: one per bucket and pair of ranks."""
        return sum(1 for _ in self._messages())

    @property
    def total_bytes(self) -> int:
        """Return the bytes that travel."""
        return sum(self.pairs.values())

    @property
    def least_bytes(self) -> int:
        """Return the bytes that receivers lack: no plan can do with less."""
        return sum(tensor.move.least_bytes for tensor in self.tensors)

    @property
    def peak_extra_bytes(self) -> int:
        """Return what a rank holds, at most, beside its state while the change goes on."""
        if self.num_now is not None:
            return max(self.now.peak_extra_bytes, self.later.peak_extra_bytes)
        return max(peak_bytes(self.buckets).values(), default=0)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object; dims are intervals of the global tensor."""
        return {
            "format": FORMAT,
            "bytes": self.total_bytes,
            "least_bytes": self.least_bytes,
            "later_bytes": self.later.total_bytes,
            "messages": self.num_messages,
            "state_bytes": list(self.state_bytes),
            "peak_extra_bytes": self.peak_extra_bytes,
            "pairs": [{"sender": a, "receiver": b, "bytes": size} for (a, b), size in self.pairs.items()],
            "buckets": [_bucket_json(bucket) for bucket in self.buckets],
        }

    def summary(self) -> str:
        """Return the plan on one line."""
        later = f", of them {bytes_text(self.later.total_bytes)} beside the next step" if self.later.buckets else ""
        return (
            f"{len(self.tensors)} tensors in {len(self.buckets)} buckets: {bytes_text(self.total_bytes)}{later} in "
            f"{self.num_messages} messages ({bytes_text(self.least_bytes)} are lacking), at most "
            f"{bytes_text(self.peak_extra_bytes)} beside a state of {bytes_text(max(self.state_bytes, default=0))}"
        )

    def __str__(self) -> str:
        rows = [[str(a), str(b), bytes_text(size)] for (a, b), size in self.pairs.items()]
        return f"{self.summary()}\n{table_text(['sender', 'receiver', 'bytes'], rows)}" if rows else self.summary()

    def _messages(self) -> Iterator[tuple[int, int, int]]:
        return (message for bucket in self.buckets for message in bucket.moves.messages)


@lru_cache(maxsize=16)
def plan_switch(
    tensors: tuple[StateTensor, ...],
    nodes: tuple[int, ...],
    *,
    extra_share: float = EXTRA_SHARE,
    least_extra_bytes: int = LEAST_EXTRA_BYTES,
    transport: Carrier = Carrier.SENT,
    splits: bool = False,
) -> SwitchPlan:
    """Plan a change of home; a pure function, the same on every rank. What was planned lately is not planned again.

    Args:
        tensors: all of the state; those that stay count for its size only.
        nodes: the node of every rank; messages inside a node are preferred.
        extra_share: what may be held beside the state, as a part of that of the rank that holds most; see
            `fill_buckets` for what one large tensor takes.
        least_extra_bytes: what may be held beside the state, however small that is.
        transport: how slices get from rank to rank.
        splits: what optimizers alone use comes after all the rest, in buckets of its own.

    Raises:
        StateError: a share that is not above 0, or a tensor named twice.
    """
    if extra_share <= 0:
        raise StateError(f"extra_share is {extra_share}\nhint: give a part of the state above 0, such as {EXTRA_SHARE}")
    names = Counter((tensor.parameter, tensor.kind) for tensor in tensors)
    if len(names) < len(tensors):
        raise StateError(f"{max(names, key=names.__getitem__)} stands in the state more than once")
    state = tuple(
        max(sum(t.part_bytes(t.source, rank) for t in tensors), sum(t.part_bytes(t.target, rank) for t in tensors))
        for rank in range(len(nodes))
    )
    moving = [tensor for tensor in tensors if tensor.source != tensor.target]
    limit = max(int(max(state, default=0) * extra_share), least_extra_bytes)

    def buckets(tensors: Sequence[StateTensor]) -> tuple[SwitchBucket, ...]:
        together = plan_moves([tensor.move for tensor in tensors], node_of=nodes.__getitem__)
        return fill_buckets(tensors, together.transfers, limit, transport)

    if not splits:
        return SwitchPlan(buckets(moving), state, transport)
    now, later = (buckets([tensor for tensor in moving if tensor.is_late is late]) for late in (False, True))
    return SwitchPlan(now + later, state, transport, len(now))


def _bucket_json(bucket: SwitchBucket) -> list[dict[str, Any]]:
    transfers: list[list[dict[str, Any]]] = [[] for _ in bucket.tensors]
    for transfer in bucket.moves.transfers:
        if transfer.sender != transfer.receiver:
            dims = [[list(interval) for interval in intervals] for intervals in transfer.dims]
            transfers[transfer.move].append({"dims": dims, "sender": transfer.sender, "receiver": transfer.receiver})
    return [
        {
            "parameter": tensor.parameter,
            "kind": tensor.kind,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "source": str(tensor.source),
            "target": str(tensor.target),
            "transfers": sent,
        }
        for tensor, sent in zip(bucket.tensors, transfers, strict=True)
    ]
