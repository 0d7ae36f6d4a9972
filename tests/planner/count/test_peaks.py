from dataclasses import replace

from hetu_fx.planner.count.peaks import (
    EVERYWHERE,
    Held,
    OpStorages,
    Owner,
    PartPeaks,
    RecomputeSegments,
    Run,
    SegmentPeaks,
    Sharing,
)
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


PARTS = {"x": 0, "a": 1, "sum": 1, "b": 1, "y": 1, "end": 2}
NUMBERS = {"x": 0, "a": 1, "sum": 2, "b": 3, "y": 4}
# Part 1 is a block: x -> a -> sum, which is sent, then b -> y. The end reads y.
BLOCK = RecomputeSegments(
    places={"x": (0, 0), "a": (1, 0), "sum": (1, 0), "b": (1, 1), "y": (1, 1), "end": (2, 0)},
    sent={"sum": Sharing.NEVER},
    readers={"x": ("a",), "a": ("sum",), "sum": ("b",), "b": ("y",), "y": ("end",), "end": ()},
)


def owner(op: str, *, is_backward: bool = False) -> Owner:
    return Owner(PARTS[op], is_backward, op=op)


def came(op: str, size: int) -> Change[Owner]:
    return Change(NUMBERS[op], size, owner(op), owner(op))


def back(storage: int, size: int, by: str, during: str = "") -> Change[Owner]:
    """Return that a storage comes in the backward of an op, or goes then."""
    made = owner(by, is_backward=not during)
    return Change(storage, size, made, owner(during or by, is_backward=True))


RUN = Run(
    changes=[
        *(came("x", 10), came("a", 40), came("sum", 10), came("b", 70), came("y", 10)),
        *(back(5, 5, "end"), back(4, -10, "y", "end")),  # a cotangent of 5
        *(back(6, 8, "b"), back(3, -70, "b", "b"), back(2, -10, "sum", "b"), back(5, -5, "end", "b")),
        *(back(7, 20, "a"), back(1, -40, "a", "a"), back(0, -10, "x", "a")),
    ],
    gradients=frozenset(),
    results={op: OpStorages(frozenset({number}), 10) for op, number in NUMBERS.items()},
    saving=frozenset({"a", "b", "end"}),
)
NONE = Held()


def test_a_piece_comes_back_without_those_after_it() -> None:
    _, (first, second), _ = BLOCK.peaks(RUN, 3)
    # x, the sum and b with the cotangents 5 and 8: 103 in all, of which x and the sum are kept by what is before
    assert second == SegmentPeaks(kept=Held(10), sent=NONE, forward=Held(80), backward=Held(83), later=Held(83))
    # x, a and the cotangents 8 and 20: 78 in all
    assert first == SegmentPeaks(kept=NONE, sent=Held(10), forward=Held(50), backward=Held(68), later=Held(68))


def test_what_is_sent_is_shared_as_it_arrives() -> None:
    shared = replace(BLOCK, sent={"sum": Sharing.IN_SEQUENCE})
    assert shared.peaks(RUN, 3)[1][0].sent == Held(10, 0, 10)


def test_a_piece_that_saves_nothing_need_not_be_computed_again() -> None:
    _, (first, _), _ = BLOCK.peaks(replace(RUN, saving=frozenset({"a", "end"})), 3)
    assert first.sent == NONE


def test_a_block_without_messages_comes_back_at_once() -> None:
    whole = RecomputeSegments({op: (part, 0) for op, part in PARTS.items()}, {}, BLOCK.readers)
    (piece,) = whole.peaks(RUN, 3)[1]
    # all that it keeps and the cotangents 5 and 8, when the end has freed y
    assert piece == SegmentPeaks(kept=Held(10), sent=NONE, forward=Held(130), backward=Held(133), later=Held(133))
