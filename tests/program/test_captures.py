"""Programs are captured once per form of batch and mode; the form tells what one program can run."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.errors import BatchError, StateError
from hetu_fx.graph.bind import GivenBatch
from hetu_fx.program import captured, captures, tracer
from hetu_fx.program.batch import batch_form, batch_from_call
from hetu_fx.program.captures import Programs


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, scale: float = 1.0, *, bias: Tensor | None = None, **others: Tensor) -> Tensor:
        return self.layer(x) * scale


def anything(*tensors: Tensor) -> None: ...


def parallel(*tensors: Tensor) -> None: ...


def form(batch: dict[str, Any], *, training: bool = True) -> str:
    return batch_form(GivenBatch.of(batch), training)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> tuple[Programs, list[bool]]:
    """Programs, and the modes in which they have been captured."""
    captured: list[bool] = []
    programs = Programs(Summing(), None)
    trace = programs.tracer.trace

    def counted(batch: Any, training: bool) -> Any:
        captured.append(training)
        return trace(batch, training)

    monkeypatch.setattr(programs.tracer, "trace", counted)
    return programs, captured


def test_arguments_are_brought_to_their_keywords() -> None:
    x, y = torch.ones(2, 3), torch.ones(1)
    assert batch_from_call(signature(Summing().forward), (x,), {"bias": None, "extra": y}) == {"x": x, "extra": y}


def test_a_forward_of_any_arguments_keeps_them_by_position() -> None:
    x = torch.ones(2, 3)
    assert batch_from_call(signature(anything), (x, x), {}) == (x, x)


def test_arguments_stand_in_the_order_of_the_forward() -> None:
    x, y = torch.ones(2, 3), torch.ones(1)
    taken = signature(Summing().forward)
    for bias in (y, None):
        made = batch_from_call(taken, (), {"bias": bias, "x": x})
        assert list(made) == ["x", "bias"] if bias is not None else list(made) == ["x"]
    assert batch_from_call(taken, (), {"x": x, "others": y, "extra": y}) == {"x": x, "others": y, "extra": y}


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(BatchError, match="missing a required argument: 'x'"):
        batch_from_call(signature(Summing().forward), (), {})


def test_sizes_do_not_change_the_form() -> None:
    assert form({"x": torch.ones(2, 3)}) == form({"x": torch.ones(5, 7)})


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
    assert form(other) != form({"x": torch.ones(2, 3)})


def test_the_mode_and_the_precision_change_the_form() -> None:
    batch = {"x": torch.ones(2, 3)}
    found = {form(batch), form(batch, training=False)}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found.add(form(batch))
    torch.set_default_dtype(torch.float64)
    try:
        found.add(form(batch))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(found) == 5


def test_the_precision_of_any_parameter_changes_the_form() -> None:
    model, batch = Summing(), {"x": torch.ones(2, 3)}
    programs = Programs(model, None)
    forms = [programs.match(GivenBatch.of(batch), True).signature]
    model.layer.bias.data = model.layer.bias.data.half()
    forms.append(programs.match(GivenBatch.of(batch), True).signature)
    model.half()
    forms.append(programs.match(GivenBatch.of(batch), True).signature)
    model.float()
    assert len(set(forms)) == 3
    assert programs.match(GivenBatch.of(batch), True).signature == forms[0]


def test_a_form_is_captured_once_for_each_mode(programs: tuple[Programs, list[bool]]) -> None:
    made, captured = programs
    for rows in (2, 5):
        made.find({"x": torch.ones(rows, 3)}, True)
        made.find({"x": torch.ones(rows, 3)}, False)
    assert captured == [True, False]


def test_a_batch_like_the_last_one_keeps_its_form_until_the_model_or_what_surrounds_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs, batch = Programs(Summing(), None), {"x": torch.ones(2, 3)}
    forms: list[str] = []
    form = captures.batch_form
    monkeypatch.setattr(captures, "batch_form", lambda *args: [forms.append(form(*args)), forms[-1]][1])
    first = programs.match(GivenBatch.of(batch), True)
    again = programs.match(GivenBatch.of({"x": torch.zeros(2, 3)}), True)
    assert (len(forms), again.program, again.signature) == (1, first.program, first.signature)
    assert not again.tensors["x"].any()
    programs.match(GivenBatch.of({"x": torch.ones(5, 3)}), True)
    programs.match(GivenBatch.of({"x": torch.ones(5, 3, dtype=torch.float64)}), True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        programs.match(GivenBatch.of(batch), True)
    programs.match(GivenBatch.of(batch), False)
    assert len(forms) == 5
    before = programs.match(GivenBatch.of(batch), True)
    programs.model.layer.weight.requires_grad_(False)
    assert programs.match(GivenBatch.of(batch), True).signature != before.signature


def test_plain_values_are_told_apart_each_time() -> None:
    programs, x = Programs(Summing(), None), torch.ones(2, 3)
    found = [programs.match(GivenBatch.of({"x": x, "scale": scale}), True).signature for scale in (1, True, 1.0, 1)]
    assert len(set(found)) == 3
    assert found[0] == found[3]


class Logging(nn.Module):
    """Passes on what a data loader's collate function makes of strings, and reads some of it where it is asked to."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.layer, self.reads = nn.Linear(3, 2), reads

    def forward(self, x: Tensor, **others: Any) -> dict[str, Any]:
        others = {name: value for name, value in others.items() if not isinstance(value, Tensor)}
        loss = self.layer(x).square().mean()
        return {"loss": loss * len(others["path"]) if self.reads else loss, **others}


def log_batch(number: int, rows: int = 4) -> dict[str, Any]:
    names = [f"{number}/{row}.png" for row in range(rows)]
    where = {"camera": f"left {number}", "size": (number, 3), "ids": [[number, row] for row in range(rows)]}
    return {"x": torch.randn(rows, 3), "path": names, "where": where, "split": f"train {number}", "raw": b"%d" % number}


def test_plain_values_that_a_forward_does_not_read_lead_to_no_other_capture() -> None:
    programs = Programs(Logging(), None)
    found = [programs.match(GivenBatch.of(log_batch(n, rows)), True) for n, rows in ((0, 4), (1, 4), (2, 3))]
    assert programs.events.count == 1
    assert len({match.signature for match in found}) == 1


def test_of_the_plain_values_those_that_are_read_are_a_part_of_what_was_captured() -> None:
    programs = Programs(Logging(reads=True), None)
    first, second = log_batch(0), log_batch(1)
    found = [programs.match(GivenBatch.of(batch), True) for batch in (first, second, {**second, "path": first["path"]})]
    assert found[0].program is found[2].program is not found[1].program
    assert found[0].plain_facts["input 'path'"] == repr(first["path"])
    assert found[0].plain_facts["input 'split'"] == "str"


def test_a_value_of_another_class_is_another_form() -> None:
    programs, x = Programs(Summing(), None), torch.ones(2, 3)
    for extra in ("a", "b", b"b", ["a"], ("a",), ["a", "b"], None, True):
        programs.match(GivenBatch.of({"x": x, "extra": extra}), True)
    assert programs.events.count == 6


def test_what_differs_between_long_values_is_told_in_few_letters() -> None:
    programs = Programs(Logging(reads=True), None)
    told = [programs.match(GivenBatch.of(log_batch(n, 64)), True).plain_facts["input 'path'"] for n in range(2)]
    assert told[0] != told[1]
    assert max(map(len, told)) <= 80


def test_what_was_matched_last_is_not_kept() -> None:
    programs = Programs(Summing(), None)
    x = torch.ones(2, 3)
    programs.match(GivenBatch.of({"x": x}), True)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None


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
    with tracer._called_as_its_own(model, programs.tracer.replaced):
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
    with pytest.raises(BatchError, match="dim 1 of input 'x' has size 6, but the captured graph needs 3") as caught:
        programs.find({"x": torch.ones(2, 6)}, True)
    assert "not captured for this size, as: cannot capture the model at test_captures.py" in str(caught.value)
    assert "IndexError" in str(caught.value)


class Capped(nn.Module):
    """Reads as many of all tokens as a share of them."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        return tokens[: int(1.25 * tokens.shape[0] / 3)].sum()


def test_a_number_that_is_made_of_several_sizes_is_that_of_the_batch_and_not_of_the_example() -> None:
    programs = Programs(Capped(), None)
    for shape in ((8, 9, 3), (6, 7, 3), (8, 9, 3)):
        program = programs.find({"x": torch.ones(shape)}, training=True)
        assert program.holds(program.bind({"x": torch.ones(shape)}))
    assert programs.events.count == 2


def test_captures_are_bounded_and_the_one_that_was_not_used_for_longest_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "MOST_CAPTURES", 2)
    model, batch = Summing(), {"x": torch.ones(2, 3)}
    programs = Programs(model, None)
    first = programs.find(batch, True)
    scaled = programs.find({**batch, "scale": 2.0}, True)
    assert programs.find(batch, True) is first
    programs.find({**batch, "scale": 3.0}, True)
    assert programs.holds(first)
    assert not programs.holds(scaled)
    assert programs.find(batch, True) is first
    assert programs.find({**batch, "scale": 2.0}, True) is not scaled
    assert programs.events.count == 4


def test_a_program_that_is_not_kept_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_CAPTURES", 1)
    programs = Programs(Summing(), None)
    gone = weakref.ref(programs.find({"x": torch.ones(2, 3)}, True))
    programs.find({"x": torch.ones(2, 3), "scale": 2.0}, True)
    gc.collect()
    assert gone() is None


def warned(programs: Programs, batches: Iterable[dict[str, Any]]) -> list[str]:
    """Return the warnings of finding programs for batches."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for batch in batches:
            programs.find(batch, True)
    return [str(one.message) for one in found if "has been captured" in str(one.message)]


def test_a_value_that_changes_before_every_step_is_named_once_with_the_way_out() -> None:
    model, batch = Summing(), {"x": torch.ones(2, 3)}
    model.forward = lambda x: model.layer(x) * model.factor  # type: ignore[assignment,method-assign,operator]

    def annealed() -> Iterator[dict[str, Any]]:
        for number in range(captured.MANY + 3):
            model.factor = 1.0 / (1 + number)  # type: ignore[assignment]
            yield batch

    (told,) = warned(Programs(model, None), annealed())
    assert "captured 8 times because of 'factor' of the model (0.125 -> 0.1111" in told
    assert "a buffer that the script writes in place, or an input" in told


def test_a_plain_value_of_the_batch_that_changes_before_every_step_is_named() -> None:
    batches = ({"x": torch.ones(2, 3), "scale": 1.0 + number} for number in range(captured.MANY + 1))
    (told,) = warned(Programs(Summing(), None), batches)
    assert "captured 8 times because of input 'scale' (8.0 -> 9.0" in told


def test_a_size_that_a_program_fixes_and_that_changes_before_every_step_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured, "MANY", 2)
    (told,) = warned(Programs(Stepping(), None), ({"x": torch.ones(2, steps)} for steps in (2, 3, 4)))
    assert "because of a size that the graph fixes (dim 1 of input 'x' has size" in told
