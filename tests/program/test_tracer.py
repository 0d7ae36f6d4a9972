"""A forward that goes on by the time is refused; one that logs it is not."""

from __future__ import annotations

import datetime
import math
import time
import warnings
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetu_fx.errors import CaptureError
from hetu_fx.program.captures import Programs
from hetu_fx.program.program import Program
from tests.program.guarded import Watching

cross_entropy = nn.functional.cross_entropy


class Attends(nn.Module):
    """Attention over dim 0, as torch has it."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.attention, self.head, self.loss = nn.MultiheadAttention(8, 2), nn.Linear(8, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = self.head(self.attention(x, x, x, need_weights=False)[0])
        if self.loss == "of all":
            return cross_entropy(seen.flatten(0, 1), y.flatten())
        return cross_entropy(seen.mean(0), y)


class Remembers(nn.Module):
    """A recurrence over dim 0, as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0][-1].pow(2).mean()


class Spread(nn.Module):
    """A loss of all rows together, that dim 1 is averaged over."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).std(0).mean()


class Positions(nn.Module):
    """Rows in dim 0, and positions that belong to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        x = x + position[:, None]
        return self.norm(self.attention(x, x, x, need_weights=False)[0].mean(1)).pow(3).mean()


class Bags(nn.Module):
    """Bags of tokens, one behind the other, each from a position on."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(7, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor, starts: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.bags(tokens, starts.int().long())), y)


def labels(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def program_of(model: nn.Module, **batch: Any) -> tuple[Program, list[str]]:
    """Return a model's program, and what was said of rows while it was captured."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = Programs(model, None).first(batch, training=True)
    return program, [str(one.message) for one in said if "row_dims" in str(one.message)]


@pytest.mark.parametrize("steps", [7, 4])  # as many steps as labels, too
def test_rows_are_the_dim_that_labels_have_where_the_loss_is_one_over_it(steps: int) -> None:
    program, said = program_of(Attends("of labels"), x=torch.randn(steps, 4, 8), y=labels(4))
    assert program.row_dims == {"x": 1, "y": 0}
    assert not program.mixes_rows
    assert "hint: say so by row_dims={'x': 1, 'y': 0}" in said[0]


def test_rows_are_the_dim_that_the_loss_averages_where_dim_0_goes_by_order() -> None:
    program, said = program_of(Remembers(), x=torch.randn(7, 4, 8))
    assert program.row_dims == {"x": 1}
    assert len(said) == 1


def test_it_is_a_doubt_where_the_loss_averages_both_dims() -> None:
    program, said = program_of(Attends("of all"), x=torch.randn(7, 4, 8), y=labels(7, 4))
    assert program.row_dims == {"x": 0, "y": 0}
    assert "independent of each other along dims {'x': 1, 'y': 1}" in program.doubt
    assert "hint: say which dims count the rows: row_dims={'x': 1, 'y': 1}" in program.doubt
    assert said == []


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Spread(), {"x": torch.randn(7, 4, 8)}),
        (Positions(), {"x": torch.randn(4, 7, 8), "position": torch.randn(7)}),
    ],
)
def test_rows_stay_dim_0_where_they_meet_in_all_alike(model: nn.Module, batch: dict[str, Tensor]) -> None:
    program, said = program_of(model, **batch)
    assert program.row_dims == {"x": 0}
    assert (program.doubt, said) == ("", [])


def test_positions_that_begin_at_0_on_every_rank_are_no_rows_that_are_put_together() -> None:
    program, said = program_of(Bags(), tokens=labels(4), starts=torch.arange(4), y=labels(4))
    assert said == []
    assert program.doubt.startswith("the values of input 'starts' are positions in the rows of another input")
    assert "hint: pass the batch of all ranks to each, by data='global'" in program.doubt


class Pairs(nn.Module):
    """Compares all rows with all, or those that it is told."""

    def __init__(self, compare: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.compare = nn.Linear(8, 3), compare

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.compare(self.up(x), at).square().mean()


@pytest.mark.parametrize(
    ("compare", "is_doubt"),
    [
        (lambda y, at: functional.cross_entropy(y @ y.T, at), True),
        (lambda y, at: y * y[at.long()], True),
        (lambda y, at: y.index_select(0, at), True),
        (lambda y, at: torch.zeros_like(y).index_add(0, at, y), True),
        (lambda y, at: functional.cross_entropy(y, at % 3), False),
        (lambda y, at: y.gather(1, at[:, None] % 3), False),
        (lambda y, at: y * torch.ones(9, 3)[at], False),
        (lambda y, at: y * y[torch.arange(len(at)).flip(0)] * at[:, None], False),
    ],
)
def test_values_of_an_input_that_are_positions_of_rows_are_a_doubt(
    compare: Callable[[Tensor, Tensor], Tensor], *, is_doubt: bool
) -> None:
    program, _ = program_of(Pairs(compare), x=torch.randn(4, 8), at=torch.arange(4))
    assert ("input 'at' are positions" in program.doubt) == is_doubt


def test_positions_of_rows_are_a_doubt_also_where_they_are_no_rows_themselves() -> None:
    program, _ = program_of(Bags(), tokens=labels(9), starts=torch.tensor([0, 2, 3]), y=labels(3))
    assert program.row_dims == {"tokens": 0}
    assert program.doubt.startswith("the values of input 'starts' are positions in the rows of another input")


START, TODAY = monotonic(), datetime.datetime


class Timed(nn.Module):
    """Has a layer, and does something with what it makes."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.act, self.took = nn.Linear(3, 2), act, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.layer(x))


def by_the_second(module: Any, y: Tensor) -> Tensor:
    return y * (1 + 0.1 * math.sin(time.time()))


def by_the_hour(module: Any, y: Tensor) -> Tensor:
    return y * datetime.datetime.now().hour


def by_the_day(module: Any, y: Tensor) -> Tensor:
    return y * TODAY.today().day


def by_what_is_imported(module: Any, y: Tensor) -> Tensor:
    return y * (int(monotonic() - START) // 3600)


def by_whole_numbers(module: Any, y: Tensor) -> Tensor:
    return y * (time.monotonic_ns() // 10**10)


def by_a_constant(module: Any, y: Tensor) -> Tensor:
    return y * torch.tensor([time.perf_counter(), 1.0])


def by_a_deadline(module: Any, y: Tensor) -> Tensor:
    if time.monotonic() - START > 12000:
        raise TimeoutError
    return y


def logs(module: Any, y: Tensor) -> Tensor:
    start = time.perf_counter()
    y = y * 2
    module.took = time.perf_counter() - start
    print(f"{monotonic() - START} s, at {datetime.datetime.now()}")
    return y


MOVES = (by_the_second, by_the_hour, by_the_day, by_what_is_imported, by_whole_numbers, by_a_constant, by_a_deadline)


@pytest.mark.parametrize("act", MOVES)
def test_a_forward_that_goes_on_by_the_time_is_refused(act: Any) -> None:
    with pytest.raises(CaptureError, match=r"goes on by the time \((time|datetime|TODAY|monotonic|perf_counter)"):
        Watching(Timed(act)).program()


def test_a_forward_that_logs_what_it_took_is_captured() -> None:
    watching = Watching(Timed(logs))
    assert watching.program() is watching.program()
