"""The reshards that are timed: by name, on how many ranks, from which annotation to which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.annotations.annotation import Annotation, parse_annotation
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove
from hetu_fx.comm_ops.resolve.resolution import MoveStep, Resolution
from hetu_fx.comm_ops.resolve.resolve import resolve

ITEMSIZE = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One reshard; `placements` are DTensor's source and target on a flat mesh, where it has them."""

    name: str
    source: str
    target: str
    placements: tuple[str, str] | None = None

    def resolution(self, shape: tuple[int, int]) -> Resolution:
        """Resolve it."""
        return resolve(parse_annotation(self.source), parse_annotation(self.target), shape)

    def by_gathering(self, shape: tuple[int, int]) -> tuple[Resolution, Resolution]:
        """Resolve the naive way: everything to every rank that is named, then each its slice."""
        source, target = parse_annotation(self.source), parse_annotation(self.target)
        whole = Annotation.replicated(sorted({*source.ranks, *target.ranks}))
        return resolve(source, whole, shape), resolve(whole, target, shape)

    def least_bytes(self, shape: tuple[int, int]) -> int:
        """Count the bytes that any way must move."""
        return TensorMove(parse_annotation(self.source), parse_annotation(self.target), shape, ITEMSIZE).least_bytes

    def is_moved(self, shape: tuple[int, int]) -> bool:
        """Tell whether it resolves to batched send-receive alone."""
        return all(isinstance(step, MoveStep) for step in self.resolution(shape).steps)


def one_node(size: int) -> Sequence[Case]:
    """List the cases on `size` ranks of one machine."""
    every, half = f"[0-{size - 1}]", size // 2
    lower, upper = f"[0-{half - 1}]", f"[{half}-{size - 1}]"
    uneven = ":".join(["2", *["1"] * (size - 2), "0"])
    unequal = "{[0-2] S(0, 3); [3]}" if size == 4 else "{[0-5] S(0, 6); [6,7] S(0, 2)}"
    return (
        Case("columns to rows", f"{every} S(1, {size})", f"{every} S(0, {size})", ("S(1)", "S(0)")),
        Case("gather", f"{every} S(0, {size})", f"{every} D({size})", ("S(0)", "R")),
        Case("scatter a sum", f"{every} P({size})", f"{every} S(0, {size})", ("P", "S(0)")),
        Case("sum", f"{every} P({size})", f"{every} D({size})", ("P", "R")),
        Case("uneven to even", f"{every} S(0, {uneven})", f"{every} S(0, {size})"),
        Case("half to all", f"{lower} S(0, {half})", f"{every} S(1, {size})"),
        Case("half to other half", f"{lower} S(1, {half})", f"{upper} S(0, {half})"),
        Case("sum over unequal groups", f"P(2) over {unequal}", f"D(2) over {unequal}"),
    )


ACROSS = (
    Case("sum", "[0-3] P(4)", "[0-3] D(4)", ("P", "R")),
    Case("gather", "[0-3] S(0, 4)", "[0-3] D(4)", ("S(0)", "R")),
    Case("scatter a sum", "[0-3] P(4)", "[0-3] S(0, 4)", ("P", "S(0)")),
    Case("gather uneven parts", "[0-3] S(0, 3:2:2:1)", "[0-3] D(4)"),
    Case("scatter a sum unevenly", "[0-3] P(4)", "[0-3] S(0, 3:2:2:1)"),
    Case("hand-over TP2 to TP2", "[0,1] D(2)", "[2,3] D(2)"),
    Case("hand-over of parts to TP2", "[0,1] S(0, 2)", "[2,3] D(2)"),
)
