"""The ways of slices from rank to rank when the home changes, and what memory each takes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from hetu_fx.comm_ops.plans.bsr_plan import Move, Transfer
from hetu_fx.switching.migrate.byte_runs import in_long_runs

ARRIVING, LEAVING, NEW = USES = "arriving", "leaving", "new"


class Way(StrEnum):
    """How slices get to other ranks.

    SENT: in messages. SHARED: in messages that all ranks read where they are packed. DIRECT: all ranks read them in
    the sender's part, without a message; those in many short runs are packed as for SHARED.
    """

    SENT = "sent"
    SHARED = "shared"
    DIRECT = "direct"

    @property
    def rooms(self) -> Mapping[str, int]:
        """Tell for how many buckets' messages a rank has room at once."""
        return _ROOMS[self]

    def packs(self, move: Move, transfer: Transfer) -> bool:
        """Tell whether a slice is packed in a message, or, if its rank keeps it, copied as it would be there."""
        return self is not Way.DIRECT or not in_long_runs(move, transfer)


_ROOMS: Mapping[Way, Mapping[str, int]] = {
    Way.SENT: {ARRIVING: 2, LEAVING: 3},
    Way.SHARED: {LEAVING: 2},
    Way.DIRECT: {LEAVING: 2},
}
