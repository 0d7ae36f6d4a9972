"""What is read out of index arithmetic is what the arithmetic computes, for sizes the graph has never seen."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetu_fx.graph.positions import FALSE, TRUE, Affine, AtMostZero, Positional, positional_values

SIZES = (4, 7)


def traced(body: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    module: fx.GraphModule = make_fx(body, tracing_mode="symbolic", pre_dispatch=True)(torch.zeros(11, 9))
    return module


def written_out(value: Positional, shape: torch.Size) -> Tensor:
    """Evaluate what is known at every position of a tensor of `shape`."""
    affine = value if isinstance(value, Affine) else value.bound
    total = torch.full(tuple(shape), affine.constant, dtype=torch.int64)
    for dim, slope in enumerate(affine.slopes):
        places = torch.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
        total = total + slope * places
    return total if isinstance(value, Affine) else total <= 0


class Checked(fx.Interpreter):
    """Runs a graph and compares every known value with the real one."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.known = positional_values(module.graph)

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if n in self.known:
            assert isinstance(value, Tensor)
            assert torch.equal(written_out(self.known[n], value.shape), value), n.format_node()
        return value


def meaning(body: Callable[[Tensor], Tensor]) -> Positional | None:
    """Return what is known of the result, once all that is known was checked at two sizes."""
    module = traced(body)
    checked = Checked(module)
    for length in SIZES:
        checked.run(torch.zeros(length + 1, length))
    result = module.graph.output_node().args[0]
    return checked.known.get(result)  # type: ignore[arg-type]


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def causal(x: Tensor) -> Tensor:
    return places(x)[None, :] <= places(x)[:, None]


def packed_with_default_positions(x: Tensor) -> Tensor:
    """Mask as a model does that looks for restarts in position ids which are just the positions."""
    ids = places(x)[None].expand(x.shape[0], -1)
    restarts = (torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows = torch.arange(x.shape[0])[:, None, None, None]
    query, key = places(x)[None, None, :, None], places(x)[None, None, None, :]
    same = restarts[rows, query] == restarts[rows, key]
    return query.new_ones((), dtype=torch.bool) & same & (ids[rows, key] <= ids[rows, query])


CAUSAL = AtMostZero(Affine(0, (-1, 1)))
PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], Positional | None]] = {
    "a range": (places, Affine(0, (1,))),
    "a range with start and step": (lambda x: torch.arange(3, 3 + 2 * x.shape[1], 2), Affine(3, (2,))),
    "a slice of a range": (lambda x: places(x)[1:], Affine(1, (1,))),
    "a slice from the end": (lambda x: places(x)[-1:], None),
    "the first of a range": (lambda x: places(x)[:1], Affine(0, (0,))),
    "a transposed difference": (lambda x: (places(x)[:, None] - 2 * places(x)).t(), None),
    "a causal mask": (causal, CAUSAL),
    "a strict mask": (lambda x: places(x)[None, :] < places(x)[:, None], AtMostZero(Affine(1, (-1, 1)))),
    "a mask turned round": (lambda x: places(x)[:, None] >= places(x)[None, :], CAUSAL),
    "the opposite of what is masked": (lambda x: ~(places(x)[None, :] > places(x)[:, None]), CAUSAL),
    "all true": (lambda x: torch.ones(x.shape[1], dtype=torch.bool), AtMostZero(Affine(0, (0,)))),
    "causal and true": (lambda x: causal(x) & torch.ones(1, dtype=torch.bool), CAUSAL),
    "causal or true": (lambda x: causal(x) | torch.ones(1, dtype=torch.bool), AtMostZero(Affine(0, (0, 0)))),
    "positions looked for restarts": (packed_with_default_positions, AtMostZero(Affine(0, (0, 0, -1, 1)))),
    "values of the batch": (lambda x: x[None, :, 0] <= x[:, None, 0], None),
    "a sliding window": (lambda x: causal(x) & (places(x)[:, None] - places(x)[None, :] < 2), None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_index_arithmetic_is_read_as_what_it_means(name: str) -> None:
    body, wanted = PROGRAMS[name]
    assert meaning(body) == wanted


def test_counting_up_by_other_than_one_is_no_constant_difference_from_the_start() -> None:
    assert meaning(lambda x: torch.diff(2 * places(x), prepend=places(x)[:1])) is None
    assert meaning(lambda x: torch.diff(places(x) + 4, prepend=places(x)[:1] + 3)) == Affine(1, (0,))


def test_an_index_that_may_be_negative_is_not_followed() -> None:
    assert meaning(lambda x: places(x)[places(x) - 1]) is None
    assert meaning(lambda x: (places(x) + 4)[places(x)]) == Affine(4, (1,))


def test_true_and_false_are_opposites() -> None:
    assert TRUE.always is True
    assert FALSE.always is False
    assert AtMostZero(Affine(0, (-1, 0))).always is True  # as for places that count from 0 and are at least 0
    assert AtMostZero(Affine(1, (0, 2))).always is False
    assert AtMostZero(Affine(0, (-1, 1))).always is None
    assert AtMostZero(Affine(1, (-1,))).always is None
    assert CAUSAL.always is None


def steps() -> st.SearchStrategy[list[tuple[str, int]]]:
    names = ("add", "rsub", "slice", "turn", "compare", "flip", "mask")
    return st.lists(st.tuples(st.sampled_from(names), st.integers(-2, 3)), max_size=6)


@settings(max_examples=25)
@given(steps())
def test_whatever_is_known_of_a_program_is_true_at_every_size(program: list[tuple[str, int]]) -> None:
    def body(x: Tensor) -> Tensor:
        value = places(x)[:, None] - places(x)[None, :]
        for name, number in program:
            integral = value.dtype is not torch.bool
            match name:
                case "add" if integral:
                    value = value + number * value.new_ones(())
                case "rsub" if integral:
                    value = number - value
                case "slice":
                    value = value[:, abs(number) % 2 :]
                case "turn":
                    value = value.transpose(0, 1)
                case "compare" if integral:
                    value = value > number if number % 2 else value == number
                case "flip" if not integral:
                    value = ~value
                case "mask" if not integral:
                    value = value & (number > 0)
        return value

    meaning(body)
