"""What tensors a leaf makes: their dtypes, and how their sizes follow from those of what it is given.

An op says so in words, as its arguments must: "float64 1*0.0 3" is a tensor of float64 with as many rows as dim 0 of
the first tensor that is given, and 3 columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch

Shapes = Sequence[Sequence[Any]]
"""The sizes of what a leaf is given in one call; symbolic ones in a trace."""

_TEXT = re.compile(r"(\d+)((?:\*\d+\.\d+)*)(?:/(\d+))?(?:([+-]\d+))?")


@dataclass(frozen=True, slots=True)
class SizeFormula:
    """A size: `times` the product of the sizes of some dims, a dim being (number of the tensor, dim), over and plus."""

    dims: tuple[tuple[int, int], ...] = ()
    times: int = 1
    over: int = 1
    plus: int = 0

    def __post_init__(self) -> None:
        assert self.over > 0, "a size is a part of another, or a multiple"

    def __str__(self) -> str:
        dims = "".join(f"*{tensor}.{dim}" for tensor, dim in self.dims)
        return f"{self.times}{dims}" + f"/{self.over}" * (self.over > 1) + f"{self.plus:+d}" * bool(self.plus)

    @classmethod
    def read(cls, text: str) -> SizeFormula:
        """Return the size that a text says."""
        found = _TEXT.fullmatch(text)
        assert found is not None, "only texts of sizes are read"
        times, dims, over, plus = found.groups()
        pairs = (one.split(".") for one in dims.split("*")[1:])
        return cls(tuple((int(tensor), int(dim)) for tensor, dim in pairs), int(times), int(over or 1), int(plus or 0))

    def of(self, shapes: Shapes) -> Any:
        """Return it in a call that is given tensors of these shapes."""
        size: Any = self.times
        for tensor, dim in self.dims:
            size = size * shapes[tensor][dim]
        return (size // self.over if self.over > 1 else size) + self.plus


@dataclass(frozen=True, slots=True)
class Form:
    """The dtype and the sizes of a tensor."""

    dtype: torch.dtype
    sizes: tuple[SizeFormula, ...]

    def __str__(self) -> str:
        return " ".join((str(self.dtype).removeprefix("torch."), *map(str, self.sizes)))

    def shape(self, shapes: Shapes) -> list[Any]:
        """Return the sizes in a call that is given tensors of these shapes."""
        return [size.of(shapes) for size in self.sizes]


def read_form(text: str) -> Form:
    """Return the form that a text says."""
    name, *sizes = text.split()
    return Form(getattr(torch, name), tuple(map(SizeFormula.read, sizes)))


def found_size(sizes: Sequence[int], given: Sequence[Shapes]) -> SizeFormula | None:
    """Return how a size follows from what is given, by some calls: what it was, and what was given, in each.

    The simplest of: always the same, that of a dim, a multiple or a part of it, so much more or less, and the product
    of two. None if it is none of these.
    """
    if len(set(sizes)) == 1:
        return SizeFormula(times=sizes[0])
    changing = [(tensor, dim) for tensor, shape in enumerate(given[0]) for dim in range(len(shape))]
    of = {place: [shapes[place[0]][place[1]] for shapes in given] for place in changing}
    alone = (found for place, others in of.items() for found in _of_one(place, sizes, others))
    return next(alone, None) or next(_of_two(sizes, of), None)


def _of_one(place: tuple[int, int], sizes: Sequence[int], others: Sequence[int]) -> Iterator[SizeFormula]:
    pairs = list(zip(sizes, others, strict=True))
    if len(set(others)) == 1:
        return
    times = {divmod(size, other) if other else (0, size) for size, other in pairs}
    over = {divmod(other, size) if size else (0, other) for size, other in pairs}
    plus = {size - other for size, other in pairs}
    if len(times) == 1 and not next(iter(times))[1]:
        yield SizeFormula((place,), times=next(iter(times))[0])
    if len(over) == 1 and not next(iter(over))[1]:
        yield SizeFormula((place,), over=next(iter(over))[0])
    if len(plus) == 1:
        yield SizeFormula((place,), plus=next(iter(plus)))


def _of_two(sizes: Sequence[int], of: dict[tuple[int, int], list[int]]) -> Iterator[SizeFormula]:
    for first, second in combinations_with_replacement(of, 2):
        products = [one * other for one, other in zip(of[first], of[second], strict=True)]
        for found in _of_one(first, sizes, products):
            if not found.plus:
                yield SizeFormula((first, second), found.times, found.over)
