from dataclasses import replace

from hetu_fx.planner.count.peaks import Held, Owner, Result, Run, Sharing
from hetu_fx.planner.count.recompute_segments import RecomputeSegments, SegmentPeaks
from hetu_fx.planner.count.storages import Change

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
    results={op: Result(frozenset({number}), 10) for op, number in NUMBERS.items()},
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
