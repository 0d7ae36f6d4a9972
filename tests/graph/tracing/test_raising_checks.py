"""A check that only raises is answered so that the forward goes on, and becomes an output of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetu_fx.errors import CaptureError
from hetu_fx.graph import capture as captures
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, OutputKind
from hetu_fx.graph.tracing import raising_checks

aten = torch.ops.aten
End = Callable[[Tensor, Tensor, Tensor], Tensor]
pytestmark = pytest.mark.usefixtures("distributions_checked")


class Net(nn.Module):
    """A layer, and what makes a loss of inputs, labels and its output."""

    def __init__(self, end: End) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.end = end

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.end(x, y, self.layer(x))


def batch() -> dict[str, Tensor]:
    return {"x": torch.rand(6, 4), "y": torch.arange(6) % 4}


def captured(end: End) -> Graph:
    return capture(Net(end), batch())


def refusal(end: End) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(end)
    return str(caught.value)


def raises_for(graph: Graph, model: Net, x: Tensor, y: Tensor) -> list[bool]:
    """Run a graph; tell of each check whether it raises."""
    state = dict(model.named_parameters())
    given = {"x": x, "y": y}
    made = graph.module()(*(given[leaf.name] if leaf.name in given else state[leaf.name] for leaf in graph.leaves))
    pairs = zip(graph.outputs, made, strict=True)
    return [bool(value) for leaf, value in pairs if leaf.kind is OutputKind.CHECK]


def _labels(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    if y.max() >= 4:
        raise ValueError("a label is too large")
    assert (x >= 0).all(), "negative"
    return F.cross_entropy(h, y)


def test_each_check_is_an_output_that_says_when_it_raises() -> None:
    model = Net(_labels)
    graph = capture(model, batch())
    assert [(check.kind, check.text.splitlines()[0]) for check in graph.checks] == [
        (ValueError, "a label is too large"),
        (AssertionError, "negative"),
    ]
    assert [check.code for check in graph.checks] == ["if y.max() >= 4:", 'assert (x >= 0).all(), "negative"']
    assert all(check.where.startswith("test_raising_checks.py:") for check in graph.checks)
    assert graph.batch_symbol is not None
    x, y = batch().values()
    assert raises_for(graph, model, x, y) == [False, False]
    assert raises_for(graph, model, -x, y) == [False, True]
    with pytest.raises(IndexError):  # what the check keeps from running
        raises_for(graph, model, x, y + 1)


def _item(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    if not 0.5 > x.sum().item():
        return h.sum()
    raise KeyError("small")


def _several(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    if h.isnan().any() or h.isinf().any() or y[:1] > 2:
        raise ArithmeticError
    return h.sum()


def test_numbers_that_are_read_are_compared_as_python_compares_them() -> None:
    model = Net(_item)
    graph = capture(model, batch())
    x, y = batch().values()
    assert [raises_for(graph, model, at, y) for at in (x, x * 0, x * 0 + 0.5 / 24)] == [[False], [True], [False]]


def test_each_part_of_a_condition_is_a_check() -> None:
    model = Net(_several)
    graph = capture(model, batch())
    x, y = batch().values()
    assert raises_for(graph, model, x, y) == [False, False, False]
    assert raises_for(graph, model, x * float("nan"), y) == [True, False, False]
    infinite = torch.zeros(6, 4)
    infinite[2, 0] = float("inf")
    assert raises_for(graph, model, infinite, y) == [False, True, False]
    assert raises_for(graph, model, x, y + 3) == [False, False, True]


def _normal(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return -torch.distributions.Normal(h, h.exp()).log_prob(x).mean()


def _categorical(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return -torch.distributions.Categorical(logits=h).log_prob(y).mean()


def _gaussian(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return F.gaussian_nll_loss(h, x, h.exp())


@pytest.mark.parametrize(("end", "number"), [(_normal, 3), (_categorical, 2), (_gaussian, 1)])
def test_what_torch_checks_for_its_users_is_checked(end: End, number: int) -> None:
    graph = captured(end)
    assert [check.kind for check in graph.checks] == [ValueError] * number
    assert not any("Fake" in check.text for check in graph.checks)


def _in_a_region(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    with torch.no_grad():
        if (h.abs() > 99).any():
            raise ValueError("large")
    return h.sum()


def _twice(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    negative = (x < 0).any()
    for _ in range(2):
        if negative:
            raise ValueError("negative")
    return h.sum()


@pytest.mark.parametrize("end", [_in_a_region, _twice])
def test_checks_stand_in_regions_and_loops(end: End) -> None:
    model = Net(end)
    graph = capture(model, batch())
    x, y = batch().values()
    assert not any(raises_for(graph, model, x, y))
    assert any(raises_for(graph, model, x - 1e4, y))


def _chooses(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return h.sum() if x.sum() > 0 else h.mean()


def _catches(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    try:
        if x.sum() < 0:
            raise ValueError("negative")
    except ValueError:
        h = h * 2
    return h.sum()


def _fails_by_itself(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return h.sum() if x.sum() > 0 else {}["nothing"]


@pytest.mark.parametrize("end", [_chooses, _catches, _fails_by_itself])
def test_what_goes_on_either_way_is_refused_with_its_line_and_a_cure(end: End) -> None:
    said = refusal(end)
    assert "test_raising_checks.py:" in said
    assert "goes on either way" in said
    assert "x.sum()" in said
    assert "hint: " in said
    assert "torch.where" in said


def _raises_always(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    if x.sum() > 0:
        raise ValueError("one")
    raise ValueError("two")


def test_what_raises_either_way_is_refused() -> None:
    assert "raises either way (two)" in refusal(_raises_always)


def _writes(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    total = h.detach().sum()
    if total.item() > 99:
        raise ValueError("large")
    total.mul_(2)
    return h.sum() + total


def test_what_is_written_to_after_it_was_read_is_refused() -> None:
    assert "writes to a tensor after it has read" in refusal(_writes)


def _sizes(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return h[: int(y.max())].sum()


def _pairs(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    kept = h[y > 0]
    if kept.shape[0] == 0:
        raise ValueError("nothing is kept")
    return kept.sum()


@pytest.mark.parametrize("end", [_sizes, _pairs])
def test_other_reads_are_refused_in_our_words(end: End) -> None:
    said = refusal(end)
    assert "reads numbers from tensors" in said
    assert "test_raising_checks.py:" in said
    assert "Guard" not in said


def _of_sizes(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    if torch.arange(x.shape[0]).max() < 3:
        raise ValueError("few rows")
    if h.isnan().any():
        raise ArithmeticError("no number")
    return h.reshape(3, 2, 4).sum()


def test_what_is_known_for_a_fixed_size_is_asked_no_more() -> None:
    model = Net(_of_sizes)
    graph = capture(model, batch())
    assert [check.kind for check in graph.checks] == [ArithmeticError]
    assert graph.fixed_rows is not None
    x, y = batch().values()
    assert raises_for(graph, model, x, y) == [False]
    assert raises_for(graph, model, x * float("nan"), y) == [True]


def test_more_checks_than_can_be_tried_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raising_checks, "MOST_CHECKS", 1)
    assert "asks for more than 1 values" in refusal(_labels)


def test_traces_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    forward = captures._Program.forward

    def counting(program: Any, *tensors: Tensor) -> Any:
        counted.append(1)
        return forward(program, *tensors)

    monkeypatch.setattr(captures._Program, "forward", counting)
    captured(lambda x, y, h: h.sum())
    assert len(counted) == 1
    counted.clear()
    captured(_normal)
    before_reading = 4
    assert len(counted) <= before_reading + 3 + 1


def test_a_question_whose_error_the_forward_catches_is_not_taken_for_answered() -> None:
    def end(x: Tensor, y: Tensor, h: Tensor) -> Tensor:
        try:
            h = h * 2 if x.max() > 3 else h
        except Exception:  # as libraries do around what may not work
            h = h * 5
        return h.sum()

    with pytest.raises(CaptureError, match=r"test_raising_checks\.py:\d+.*goes on either way"):
        captured(end)
