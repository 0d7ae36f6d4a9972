"""What stands on is kept until it has been read, and no longer."""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.comm_ops.wire.peers.standing import Standing


@dataclass
class Stood:
    """An exchange that others have read or not."""

    has_been_read: bool = False
    ends: int = 0

    def is_read(self) -> bool:
        return self.has_been_read

    def end(self) -> None:
        self.ends += 1


def test_the_next_of_the_same_peers_waits_for_the_one_before() -> None:
    standing, first, second = Standing(), Stood(), Stood()
    standing.add(1, first)
    assert first.ends == 0
    standing.add(1, second)
    assert (first.ends, second.ends) == (1, 0)


def test_those_of_other_peers_stay_until_they_are_read() -> None:
    standing, read, unread = Standing(), Stood(has_been_read=True), Stood()
    standing.add(1, read)
    standing.add(2, unread)
    standing.add(3, Stood())
    standing.end()
    assert (read.ends, unread.ends) == (0, 1)
