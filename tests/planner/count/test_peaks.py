from hetu_fx.planner.count.peaks import EVERYWHERE, Held, Owner, PartPeaks, Run, Sharing
from hetu_fx.planner.count.storages import Change

AHEAD = [Owner(0), Owner(1, sharing=Sharing.ALWAYS)]
BACK = [Owner(0, is_backward=True), Owner(1, is_backward=True)]


def change(storage: int, size: int, owner: Owner, during: Owner | None = None) -> Change[Owner]:
    return Change(storage, size, owner, during or owner)


TWO_PARTS = [
    change(0, 10, AHEAD[0]),
    change(1, 4, AHEAD[0]),
    change(1, -4, AHEAD[0]),
    change(2, 20, AHEAD[1]),
    change(3, 6, BACK[1]),  # gradient of a parameter
    change(4, 5, BACK[1]),
    change(2, -20, AHEAD[1], BACK[1]),
    change(5, 7, BACK[0]),  # gradient of a parameter
    change(0, -10, AHEAD[0], BACK[0]),
    change(4, -5, BACK[1], BACK[0]),
]


def test_each_part_has_what_it_keeps_and_the_most_above_it() -> None:
    parts, everywhere = Run(TWO_PARTS, frozenset({3, 5})).peaks(2)
    assert parts[0] == PartPeaks(kept=Held(10), forward=Held(14), backward=Held(12), later=Held(12))
    # held at most: 10 and 20 kept, then the gradient of 6 and a cotangent of 5; later the 6 only for a moment
    assert parts[1] == PartPeaks(kept=Held(20, 20), forward=Held(20, 20), backward=Held(11), later=Held(6))
    assert everywhere == Held()


def test_what_belongs_to_no_part_is_kept_everywhere_and_takes_no_turn() -> None:
    table = Owner(EVERYWHERE)
    parts, everywhere = Run([change(9, 3, table), *TWO_PARTS], frozenset({3, 5})).peaks(2)
    assert everywhere == Held(3)
    assert parts == Run(TWO_PARTS, frozenset({3, 5})).peaks(2)[0]


def test_a_size_that_is_known_decides_how_it_is_shared() -> None:
    owner = Owner(0, sharing=Sharing.ALWAYS, sizes={8: Sharing.NEVER, 7: Sharing.IN_SEQUENCE})
    assert Held.by(change(0, 8, owner)) == Held(8)
    assert Held.by(change(0, 7, owner)) == Held(7, 0, 7)
    assert Held.by(change(0, -9, owner)) == Held(-9, -9)
