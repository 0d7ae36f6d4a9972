"""Rounds of a few numbers among ranks of one machine: each says its own, and hears those of all.

A rank writes its numbers to memory of its own that the others have mapped, so that saying and hearing are no messages,
and no calls of the system. What a process has said can be heard after it has ended.

Nobody says that it has heard. A ring of rounds stands at once, and before a rank says something it has heard all of the
round half a ring earlier. So whoever has said something half a ring ago had heard all of a whole ring ago by then, and
that may be written over.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from functools import partial
from zlib import crc32

from hetu_fx.comm_ops.wire.groups import GroupTable, guarded
from hetu_fx.comm_ops.wire.peers.memory import SLOT_BYTES, Peers, all_are_peers, mutual_peers
from hetu_fx.comm_ops.wire.small_sums import refuse_unlike
from hetu_fx.errors import CommError

RING = 64
"""So many rounds stand at once; half as many may be begun and not heard."""

MOST_NUMBERS = 128
"""In a round, of each rank."""

_HEAD = struct.Struct("<QIIQ")  # the round, what it is for, how many numbers, and a word that belongs to all
_ROUND_BYTES = _HEAD.size + 8 * MOST_NUMBERS

Numbers = Sequence[float]


class SharedRounds:
    """All ranks' numbers, round by round; all ranks begin the same rounds in the same order.

    Args:
        table: the ranks.
        peers: their processes; each writes to its board, in slots of its own kind.
    """

    def __init__(self, table: GroupTable, peers: Peers) -> None:
        self._table, self._peers = table, peers
        self._memory = {rank: board.memory for rank, board in (*peers.boards.items(), (table.rank, peers.own))}
        self._count = 0
        self._begun: deque[SharedRound] = deque()

    def say(self, numbers: Numbers, what: str) -> SharedRound:
        """Begin a round: say this rank's numbers, as many as on all ranks, and `what` they are for."""
        if len(numbers) > MOST_NUMBERS:
            raise CommError(f"{what} is of {len(numbers)} numbers, more than the {MOST_NUMBERS} of a round")
        self._count += 1
        self._forget_heard()
        kind = _kind(what, len(numbers))
        body = struct.pack(f"<{len(numbers)}d", *numbers)
        own, start = self._memory[self._table.rank], self._count % RING * _ROUND_BYTES
        own[start + _HEAD.size : start + _HEAD.size + len(body)] = body
        _HEAD.pack_into(own, start, self._count, kind, len(numbers), crc32(body, kind) ^ self._count)
        self._begun.append(SharedRound(self, self._count, kind, tuple(numbers), what))
        return self._begun[-1]

    def _forget_heard(self) -> None:
        """Hear those of half a ring ago, so that their place, and that of all before, is free on all ranks."""
        while self._begun and (self._begun[0].heard or self._begun[0].number <= self._count - RING // 2):
            oldest = self._begun.popleft()
            if not oldest.heard:
                with guarded(oldest.what, range(self._table.size), self._table):
                    oldest.wait()

    def hear(self, of: SharedRound) -> list[Numbers]:
        """Return all ranks' numbers of a round, waiting for those that have not come.

        Raises:
            DivergedError: a rank has begun another one.
            RuntimeError: a rank has gone before, or has not come in time.
        """
        return [of.numbers if rank == self._table.rank else self._of(rank, of) for rank in range(self._table.size)]

    def take_back(self, of: SharedRound) -> None:
        """Be as if the newest round had not begun: nobody finds anything of it, and the next has its number."""
        assert of.number == self._count, "only what was said last can be taken back"
        self._begun.remove(of)
        _HEAD.pack_into(self._memory[self._table.rank], self._count % RING * _ROUND_BYTES, 0, 0, 0, 0)
        self._count -= 1

    def has_come(self, of: SharedRound) -> bool:
        """Tell whether all ranks have begun a round."""
        return all(rank == self._table.rank or self._read(rank, of.number) for rank in range(self._table.size))

    def _of(self, rank: int, of: SharedRound) -> Numbers:
        found = self._read(rank, of.number)
        if found is None:
            found = self._peers.until(partial(self._read, rank, of.number), rank, self._table)
        kind, numbers = found
        if kind != of.kind:
            refuse_unlike(self._table, of.what)
        return numbers

    def _read(self, rank: int, number: int) -> tuple[int, Numbers] | None:
        """Return what a rank has said in a round, and what for; None if it has not, or is about to."""
        memory, start = self._memory[rank], number % RING * _ROUND_BYTES
        found, kind, count, check = _HEAD.unpack_from(memory, start)
        if found != number or count > MOST_NUMBERS:
            return None
        body = memory[start + _HEAD.size : start + _HEAD.size + 8 * count]
        return (kind, struct.unpack(f"<{count}d", body)) if check == crc32(body, kind) ^ number else None


class SharedRound:
    """A round that this rank has begun. `wait` hears the others, once; `heard` are all numbers then, by rank."""

    def __init__(self, rounds: SharedRounds, number: int, kind: int, numbers: Numbers, what: str) -> None:
        self._rounds, self.number, self.kind, self.numbers, self.what = rounds, number, kind, numbers, what
        self.heard: list[Numbers] = []

    def is_completed(self) -> bool:
        """Tell whether `wait` would not block."""
        return bool(self.heard) or self._rounds.has_come(self)

    def wait(self) -> None:
        """Hear the others; see `SharedRounds.hear`. The caller guards it."""
        if not self.heard:
            self.heard = self._rounds.hear(self)

    def take_back(self) -> None:
        """Be as if it had not begun."""
        self._rounds.take_back(self)


def _kind(what: str, count: int) -> int:
    """Return a number that tells a round from those of something else."""
    return crc32(f"{what} of {count} numbers".encode())


def open_rounds(table: GroupTable) -> None:
    """Let the ranks of a table that can all read each other's memory have rounds, from now on; collective, once."""
    if table.rounds is None and table.size > 1 and table.is_of_processes:
        peers = mutual_peers(table, tuple(range(table.size)), -(-RING * _ROUND_BYTES // SLOT_BYTES))
        table.rounds = SharedRounds(table, peers) if all_are_peers(peers, table, tuple(range(table.size))) else None
