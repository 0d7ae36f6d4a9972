"""Programs are captured once per form of batch and mode; the form tells what one program can run."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import BatchError, StateError
from hetu_fx.program import captures
from hetu_fx.program.captures import Programs, batch_of, form_of


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, scale: float = 1.0, *, bias: Tensor | None = None, **others: Tensor) -> Tensor:
        return self.layer(x) * scale


def anything(*tensors: Tensor) -> None: ...


def parallel(*tensors: Tensor) -> None: ...


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> tuple[Programs, list[bool]]:
    """Programs, and the modes in which they have been captured."""
    captured: list[bool] = []
    programs = Programs(Summing(), None)
    trace = programs.trace
    monkeypatch.setattr(programs, "trace", lambda batch, training: captured.append(training) or trace(batch, training))
    return programs, captured


def test_arguments_are_brought_to_their_keywords() -> None:
    x, y = torch.ones(2, 3), torch.ones(1)
    assert batch_of(signature(Summing().forward), (x,), {"bias": None, "extra": y}) == {"x": x, "extra": y}


def test_a_forward_of_any_arguments_keeps_them_by_position() -> None:
    x = torch.ones(2, 3)
    assert batch_of(signature(anything), (x, x), {}) == (x, x)


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(BatchError, match="missing a required argument: 'x'"):
        batch_of(signature(Summing().forward), (), {})


def test_sizes_do_not_change_the_form() -> None:
    assert form_of({"x": torch.ones(2, 3)}, True) == form_of({"x": torch.ones(5, 7)}, True)


@pytest.mark.parametrize(
    "other",
    [
        {"y": torch.ones(2, 3)},
        {"x": torch.ones(2)},
        {"x": torch.ones(2, 3).half()},
        {"x": torch.ones(2, 3), "scale": 2.0},
    ],
    ids=["name", "dims", "dtype", "constant"],
)
def test_names_dims_dtypes_and_constants_change_the_form(other: dict[str, Any]) -> None:
    assert form_of(other, True) != form_of({"x": torch.ones(2, 3)}, True)


def test_the_mode_and_the_precision_change_the_form() -> None:
    batch = {"x": torch.ones(2, 3)}
    found = {form_of(batch, True), form_of(batch, False)}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found.add(form_of(batch, True))
    torch.set_default_dtype(torch.float64)
    try:
        found.add(form_of(batch, True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(found) == 5


def test_the_precision_of_any_parameter_changes_the_form() -> None:
    model, batch = Summing(), {"x": torch.ones(2, 3)}
    programs = Programs(model, None)
    forms = [programs.form(batch, True)]
    model.layer.bias.data = model.layer.bias.data.half()
    forms.append(programs.form(batch, True))
    model.half()
    forms.append(programs.form(batch, True))
    model.float()
    assert len(set(forms)) == 3
    assert programs.form(batch, True) == forms[0]


def test_a_form_is_captured_once_for_each_mode(programs: tuple[Programs, list[bool]]) -> None:
    made, captured = programs
    for rows in (2, 5):
        made.find({"x": torch.ones(rows, 3)}, True)
        made.find({"x": torch.ones(rows, 3)}, False)
    assert captured == [True, False]


def test_asking_for_the_training_program_before_there_is_one_says_what_to_do() -> None:
    with pytest.raises(StateError, match="run a training batch first"):
        _ = Programs(Summing(), None).training


@pytest.mark.parametrize("before", [None, anything], ids=["of its class", "replaced before"])
def test_the_models_own_forward_is_captured_not_the_one_of_a_parallel_model(before: Any) -> None:
    model = Summing()
    if before is not None:
        model.forward = before
    programs = Programs(model, None)
    model.forward = parallel  # type: ignore[assignment]
    with captures._called_as_its_own(model, programs.replaced):
        assert model.forward is before if before else model.forward.__func__ is Summing.forward
    assert model.forward is parallel


def test_a_program_is_known_by_its_graph_whatever_the_sizes_of_its_example() -> None:
    few, many = (Programs(Summing(), None).find({"x": torch.ones(rows, 3)}, True) for rows in (2, 5))
    other = Programs(nn.Linear(3, 2), None).find({"input": torch.ones(2, 3)}, True)
    assert few.fingerprint == many.fingerprint
    assert few.fingerprint != other.fingerprint


class Stepping(nn.Module):
    """Fixes the number of its steps, and takes at most five."""

    def forward(self, x: Tensor) -> Tensor:
        bounds = (1, 2, 3, 4, 5)
        return torch.stack([x[:, at] * bounds[at] for at in range(x.shape[1])]).mean()


def test_a_size_that_a_program_fixes_has_a_program_of_its_own_and_is_told_as_the_reason() -> None:
    programs = Programs(Stepping(), None)
    three, four = ({"x": torch.ones(2, steps)} for steps in (3, 4))
    found = [programs.find(batch, True) for batch in (three, four, three, four)]
    assert found[0] is found[2] is not found[1] is found[3]
    first, second = programs.events
    assert first.why == ()
    assert "dim 1 of input 'x' has size 4, but the captured graph needs 3" in second.why[0]


def test_a_size_that_the_model_itself_does_not_take_is_the_batchs_error() -> None:
    programs = Programs(Stepping(), None)
    programs.find({"x": torch.ones(2, 3)}, True)
    with pytest.raises(BatchError, match="dim 1 of input 'x' has size 6, but the captured graph needs 3"):
        programs.find({"x": torch.ones(2, 6)}, True)
