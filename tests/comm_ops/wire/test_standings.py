"""Who has left the common path, from what ranks tell: named if it does not come, waited for if it is at work."""

from __future__ import annotations

import pytest

from hetu_fx.comm_ops.wire.standings import Standing, Standings

BOUND = 10.0
WAITS = Standing(1, call="run", place="train.py:31", waits_for="agreement on the step", seconds=BOUND)
AWAY = Standing(1, place="train.py:50", seconds=BOUND, last="loss.backward() at train.py:40", steps=12)
AT_WORK = Standing(1, call="run", place="train.py:31")
ELSEWHERE = Standing(1, call="save", place="train.py:60", waits_for="agreement", seconds=BOUND / 2)


def _standings(*others: Standing | None, silent: float = 0.0) -> Standings:
    return Standings(dict(enumerate(others, 1)), dict.fromkeys(range(1, len(others) + 1), silent))


@pytest.mark.parametrize(
    ("others", "astray"),
    [
        ([AWAY, WAITS], (1,)),
        ([AWAY, AT_WORK], ()),
        ([AT_WORK, WAITS], ()),
        ([WAITS, WAITS], ()),
        ([ELSEWHERE, WAITS], (1,)),
        ([ELSEWHERE, AT_WORK], ()),
        ([None, WAITS], (1,)),
        ([Standing(1, left="ValueError"), AT_WORK], (1,)),
        ([Standing(1, seconds=BOUND / 2), WAITS], ()),
    ],
    ids=["away", "work", "works", "same", "elsewhere", "behind", "never", "left", "briefly"],
)
def test_a_rank_is_named_only_if_it_will_not_come(others: list[Standing | None], astray: tuple[int, ...]) -> None:
    assert _standings(*others).astray(WAITS, BOUND) == astray


def test_nobody_but_who_has_left_is_named_before_the_bound() -> None:
    own = Standing(1, call="run", waits_for="agreement", seconds=BOUND - 1)
    assert _standings(AWAY, WAITS).astray(own, BOUND) == ()
    assert _standings(AWAY, Standing(1, left="")).astray(own, BOUND) == (2,)


def test_a_rank_without_new_signs_of_life_is_named() -> None:
    standings = Standings()
    for _ in range(8):
        standings.hear({1: AT_WORK}, 1.0)
    assert (standings.silent_for(7.0), standings.silent_for(8.0)) == ((1,), ())
    assert standings.astray(WAITS, BOUND) == (1,)


def test_the_verdict_says_where_everyone_is() -> None:
    left = Standing(1, left="ValueError: a bad row, at train.py:9", last="model(...) at train.py:31", steps=3)
    told = _standings(AWAY, left, ELSEWHERE).verdict(0, WAITS, (1,), BOUND)
    assert told.startswith("rank 1 did not come to where rank 0 waits, at train.py:31:\n  rank 0: has waited 10.0 s")
    assert "rank 1: has been in its own code for 10.0 s, now at train.py:50; its last call was loss.backward()" in told
    assert "rank 2: has left the program (ValueError: a bad row, at train.py:9); its last call was model(...)" in told
    assert "rank 3: has waited 5.0 s for others (agreement) at train.py:60" in told
    assert "wait_seconds=600" in told


def test_standings_are_written_and_read() -> None:
    assert Standing.read(WAITS.write()) == WAITS
