"""One tensor's change from one annotation to another, by value: what ops of both tiers carry as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from hetu_fx.annotations.annotation import Annotation, Shape, parse_annotation
from hetu_fx.errors import AnnotationError

_CHANGE = re.compile(r"(.*) -> (.*) of (scalar|(?:\d+|\?)(?:x(?:\d+|\?))*)")


@dataclass(frozen=True, slots=True)
class Transition:
    """Says how a tensor of global `shape` (None: symbolic) is annotated before and after."""

    source: Annotation
    target: Annotation
    shape: Shape

    def __str__(self) -> str:
        """Write it as `source -> target of 8x?x3`, which `parse_transition` reads."""
        return f"{self.source} -> {self.target} of {format_shape(self.shape)}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold a part before or after, sorted."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))


def format_shape(shape: Shape) -> str:
    """Write a shape, `?` for symbolic dims and `scalar` for none."""
    return "x".join("?" if size is None else str(size) for size in shape) or "scalar"


@lru_cache(maxsize=4096)
def parse_transition(text: str) -> Transition:
    """Read what `str(change)` wrote; raise AnnotationError on anything else."""
    match = _CHANGE.fullmatch(text)
    if match is None:
        raise AnnotationError(f"cannot read {text!r}\nhint: write it like '[0,1] S(0, 2) -> [0,1] D(2) of 8x4'")
    shape: list[int | None] = []
    for size in match[3].split("x") if match[3] != "scalar" else ():
        shape.append(None if size == "?" else int(size))
    return Transition(parse_annotation(match[1]), parse_annotation(match[2]), tuple(shape))
