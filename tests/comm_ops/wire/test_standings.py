"""Who has left the common path, from what ranks tell: named if it does not come, waited for if it is at work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.comm_ops.wire.standings import CUT_OFF_SECONDS, RankStatus, Reach, Standings, StoreSilence

BOUND = 10.0
WAITS = RankStatus(1, call="run", place="train.py:31", waits_for="agreement on the step", seconds=BOUND)
AWAY = RankStatus(1, place="train.py:50", seconds=BOUND, last="loss.backward() at train.py:40", steps=12)
AT_WORK = RankStatus(1, call="run", place="train.py:31")
ELSEWHERE = RankStatus(1, call="save", place="train.py:60", waits_for="agreement", seconds=BOUND / 2)


def _standings(*others: RankStatus | None, silent: float = 0.0) -> Standings:
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
        ([RankStatus(1, left="ValueError"), AT_WORK], (1,)),
        ([RankStatus(1, seconds=BOUND / 2), WAITS], ()),
    ],
    ids=["away", "work", "works", "same", "elsewhere", "behind", "never", "left", "briefly"],
)
def test_a_rank_is_named_only_if_it_will_not_come(others: list[RankStatus | None], astray: tuple[int, ...]) -> None:
    assert _standings(*others).astray(WAITS, BOUND) == astray


def test_ranks_that_wait_for_unlike_models_are_named() -> None:
    own, other = (replace(WAITS, table=table) for table in ("of one model", "of another"))
    assert _standings(other).astray(own, BOUND) == (1,)
    assert _standings(own).astray(own, BOUND) == ()


def test_nobody_but_who_has_left_is_named_before_the_bound() -> None:
    own = RankStatus(1, call="run", waits_for="agreement", seconds=BOUND - 1)
    assert _standings(AWAY, WAITS).astray(own, BOUND) == ()
    assert _standings(AWAY, RankStatus(1, left="")).astray(own, BOUND) == (2,)


def test_a_rank_without_new_signs_of_life_is_named() -> None:
    standings = Standings()
    for _ in range(8):
        standings.hear({1: AT_WORK}, 1.0)
    assert (standings.silent_ranks(7.0), standings.silent_ranks(8.0)) == ((1,), ())
    assert standings.astray(WAITS, BOUND) == (1,)


def test_the_verdict_says_where_everyone_is() -> None:
    left = RankStatus(1, left="ValueError: a bad row, at train.py:9", last="model(...) at train.py:31", steps=3)
    told = _standings(AWAY, left, ELSEWHERE).verdict(0, WAITS, (1,), BOUND)
    assert told.startswith("rank 1 did not come to where rank 0 waits, at train.py:31:\n  rank 0: has waited 10.0 s")
    assert "rank 1: has been in its own code for 10.0 s, now at train.py:50; its last call was loss.backward()" in told
    assert "rank 2: has left the program (ValueError: a bad row, at train.py:9); its last call was model(...)" in told
    assert "rank 3: has waited 5.0 s for others (agreement) at train.py:60" in told
    assert "wait_seconds=600" in told


def test_standings_are_written_and_read() -> None:
    assert RankStatus.read(WAITS.write()) == WAITS


def _heard(silence: StoreSilence, *, is_asked: bool = True, passed: float = 1.0, waits: bool, refused: bool) -> Reach:
    return silence.hear(is_asked, passed, BOUND, is_needed=waits or not refused, is_waiting=waits)


@pytest.mark.parametrize("refused", [False, True])
def test_a_store_that_does_not_answer_is_said_at_once_and_given_up_after_the_bound(refused: bool) -> None:
    silence, news = StoreSilence(), []
    while not news or news[-1] is not Reach.OVER:
        news.append(_heard(silence, waits=True, refused=refused))
    lost = next(seconds for seconds in range(100) if seconds > CUT_OFF_SECONDS)
    assert news.index(Reach.LOST) + 1 == lost
    assert news.count(Reach.SAME) == len(news) - 2
    assert len(news) == BOUND + 1


def test_a_store_that_answers_in_time_is_no_news_and_one_that_answers_late_is_back() -> None:
    silence = StoreSilence()
    assert _heard(silence, passed=CUT_OFF_SECONDS, waits=True, refused=False) is Reach.SAME
    assert _heard(silence, is_asked=False, waits=True, refused=False) is Reach.SAME
    assert _heard(silence, passed=CUT_OFF_SECONDS + 1, waits=True, refused=False) is Reach.LOST
    assert _heard(silence, is_asked=False, waits=True, refused=False) is Reach.BACK
    assert _heard(silence, is_asked=False, waits=True, refused=False) is Reach.SAME


def test_who_waits_for_nobody_is_not_ended_and_needs_no_store_whose_process_has_ended() -> None:
    silence = StoreSilence()
    assert _heard(silence, passed=10 * BOUND, waits=False, refused=True) is Reach.SAME
    assert _heard(silence, waits=False, refused=False) is Reach.LOST
    assert _heard(silence, waits=False, refused=False) is Reach.SAME
    assert _heard(silence, waits=True, refused=False) is Reach.OVER
