"""What other processes have captured is used where it is of an equal model, and nowhere else."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.program import tracer
from hetu_fx.program.captures import Programs
from tests.end_to_end.cells import STEPS, make_batch, make_model
from tests.ranks import remembered, stored
from tests.spawned import CAPTURES


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Programs, int]]:
    """Give what finds the program of a model as a process that knows nothing does, and how many captures there were."""
    count, capture = 0, tracer.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return capture(*args, **kwargs)

    monkeypatch.setattr(tracer, "capture", counted)
    monkeypatch.setenv(CAPTURES, str(tmp_path))

    def of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Programs, int]:
        monkeypatch.setattr(remembered, "_known", {})
        made = Programs(model, None)
        made.first(batch, True)
        return made, count

    return of


@pytest.mark.parametrize("name", ["llama", "t5", "conv"])
def test_another_process_has_the_program_of_the_one_that_captured(captured: Any, name: str) -> None:
    batch = make_batch(name, STEPS[0], 0)
    one, first = captured(make_model(name), batch)
    other, both = captured(make_model(name), batch)
    assert (first, both) == (1, 1)
    assert other.current is not one.current
    assert other.current.fingerprint == one.current.fingerprint
    assert str(other.current.graph.graph) == str(one.current.graph.graph)


class Scaled(nn.Module):
    """Calls a function that it was given on a layer's output, and reads a number."""

    def __init__(self, function: Callable[[Tensor], Tensor], factor: float = 2.0) -> None:
        super().__init__()
        self.layer, self.function, self.factor = nn.Linear(4, 4), function, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).sum() * self.factor


def times(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * by


BATCH = {"x": torch.randn(6, 4)}


@pytest.mark.parametrize(
    "unlike",
    [
        Scaled(times(3.0)),
        Scaled(times(2.0), 3.0),
        Scaled(lambda x: x - 2.0),
        Scaled(torch.tanh),
        Scaled(times(2.0)).double(),
        Scaled(times(2.0)).requires_grad_(False),
    ],
)
def test_a_model_that_reads_something_else_is_captured(captured: Any, unlike: nn.Module) -> None:
    assert captured(Scaled(times(2.0)), BATCH)[1] == 1
    assert captured(Scaled(times(2.0)), BATCH)[1] == 1
    assert captured(unlike, BATCH)[1] == 2


def test_what_means_something_in_its_own_process_only_is_captured_in_each(captured: Any) -> None:
    doubled = operator.methodcaller("mul", 2)
    with pytest.raises(stored.UntoldError):
        stored.told(doubled)
    assert [captured(Scaled(doubled), BATCH)[1] for _ in range(2)] == [1, 2]


def test_values_are_told_by_what_they_are() -> None:
    same = [(times(2.0), times(3.0)), ({1, 2}, {2, 1}), ([1.0], [1.0]), (torch.zeros(2), torch.zeros(2))]
    assert all(stored.told(one) == stored.told(other) for one, other in same)
    unlike = [1, 1.0, "1", True, None, (1,), [1], {1}, torch.tanh, torch.sin, times(2.0), len, torch.ones(1), Scaled]
    assert len({stored.told(value) for value in unlike}) == len(unlike)


def test_one_that_captures_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPTURES, str(tmp_path))
    order: list[str] = []

    def come_later() -> None:
        with stored.shelf(("key",)):
            order.append("second")

    with stored.shelf(("key",)):
        later = threading.Thread(target=come_later)
        later.start()
        with stored.shelf(("another",)):
            order.append("first")
        later.join(10 * stored.PAUSE_SECONDS)
        order.append("done")
    later.join(stored.WAIT_SECONDS)
    assert order == ["first", "done", "second"]


def test_without_a_folder_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAPTURES, raising=False)
    with stored.shelf(("key",)) as shelf:
        assert shelf.read() is None
    with stored.shelf((functools.partial(times, 2.0),)) as shelf:
        assert shelf is stored.NOTHING
