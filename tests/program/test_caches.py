"""What a forward keeps is a cache where a call that finds it makes the same: it is captured; all else is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.check.verdict import judge
from hetu_fx.errors import CaptureError
from hetu_fx.graph.leaves.trace import LeafWarning
from hetu_fx.lockstep import Lockstep, Trained, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import Program
from hetu_fx.program.reads import Reads
from hetu_fx.program.tracer import Tracer
from hetu_fx.switching.graph_execution import GraphExecution


class Keeping(nn.Module):
    """Multiplies what its layers make by what `act` makes of itself, with room to keep that.

    Args:
        act: act(self, x), x of shape (rows, length, 4), gives what (rows, length, 4) is multiplied by.
    """

    empty: Tensor | None
    short: Tensor
    saved: Tensor
    slopes: Tensor

    def __init__(self, act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 8), nn.Linear(8, 4), act
        self.kept: Any = None
        self.tables: dict[str, Any] = {}
        self.register_buffer("empty", None)
        self.register_buffer("short", torch.zeros(1), persistent=False)
        self.register_buffer("saved", torch.zeros(1))
        self.register_buffer("slopes", torch.full((4,), 0.3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.act(self, x)
        return (self.second(torch.tanh(self.first(x))) * kept).pow(2).mean()


def a_table_of_one_length(module: Any, x: Tensor) -> Tensor:
    if module.kept is None or module.kept.shape[0] != x.shape[1]:
        module.kept = torch.arange(x.shape[1], dtype=x.dtype)
    return module.kept[:, None]


def a_table_that_grows(module: Any, x: Tensor) -> Tensor:
    if module.kept is None or module.kept.shape[0] < x.shape[1]:
        module.kept = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), torch.full((4,), 0.3, dtype=x.dtype)).cos()
    return module.kept[: x.shape[1]]


def a_table_in_a_dictionary(module: Any, x: Tensor) -> Tensor:
    if "table" not in module.tables or module.tables["table"].shape[0] != x.shape[1]:
        module.tables["table"] = torch.ones(x.shape[1], dtype=x.dtype).cumsum(0)
    return module.tables["table"][:, None]


def a_buffer_that_is_registered(module: Any, x: Tensor) -> Tensor:
    if not hasattr(module, "mask") or module.mask.shape[0] < x.shape[1]:
        module.register_buffer("mask", torch.ones(x.shape[1], 4, dtype=x.dtype).tril(), persistent=False)
    return module.mask[: x.shape[1]]


def a_buffer_that_was_empty(module: Any, x: Tensor) -> Tensor:
    if module.empty is None or module.empty.shape[0] != x.shape[1]:
        module.empty = torch.arange(x.shape[1]).to(x.dtype)
    return module.empty[:, None]


def a_buffer_of_another_size(module: Any, x: Tensor) -> Tensor:
    if module.short is None or module.short.shape[0] != x.shape[1]:
        module.short = torch.zeros(x.shape[1], dtype=x.dtype)
        module.short[1:] = torch.arange(1, x.shape[1], dtype=x.dtype)
    return module.short[:, None]


def a_buffer_that_is_saved(module: Any, x: Tensor) -> Tensor:
    if module.saved.shape[0] < x.shape[1]:
        module.saved = torch.arange(x.shape[1]).to(x.dtype)
    return module.saved[: x.shape[1], None]


def a_buffer_of_which_later_calls_take_a_part(module: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    if module.empty is None or module.empty.shape[0] < length:
        places = torch.arange(length, 0, -1).to(x.dtype)
        module.register_buffer("empty", places[:, None] * module.slopes, persistent=False)
    return module.empty[-length:]


def a_mask_of_all_rows(module: Any, x: Tensor) -> Tensor:
    if module.kept is None or module.kept.shape[:2] != x.shape[:2]:
        module.kept = torch.ones(x.shape[0], x.shape[1], 1, dtype=x.dtype)
    return module.kept


def places_in_a_dictionary(module: Any, x: Tensor) -> Tensor:
    key = str(x.shape[1])
    if key not in module.tables:
        module.tables[key] = (..., slice(None, x.shape[1]), None)
    return torch.arange(16, dtype=x.dtype)[module.tables[key]]


def a_table_of_a_fixed_size(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = torch.arange(4, dtype=x.dtype)
    return module.kept


CACHES = [
    a_table_of_one_length,
    a_table_that_grows,
    a_table_in_a_dictionary,
    a_buffer_that_is_registered,
    a_buffer_that_was_empty,
    a_buffer_of_another_size,
    a_buffer_that_is_saved,
    a_buffer_of_which_later_calls_take_a_part,
    a_mask_of_all_rows,
    places_in_a_dictionary,
    a_table_of_a_fixed_size,
]


def the_mean_of_the_first_batch(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = x.mean()
    return module.kept


def the_length_of_the_first_batch(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = torch.ones(()) / x.shape[1]
    return module.kept


def the_sum_of_a_batch_in_a_buffer(module: Any, x: Tensor) -> Tensor:
    if module.short.shape[0] != x.shape[1]:
        module.short = x.detach().sum((0, 2))
    return module.short[:, None]


def the_mean_of_what_a_buffer_was(module: Any, x: Tensor) -> Tensor:
    if module.saved.shape[0] != x.shape[1]:
        module.saved = module.saved.mean().repeat(x.shape[1]) + 1
    return module.saved[:, None]


def a_number_of_the_first_batch(module: Any, x: Tensor) -> Any:
    if module.kept is None:
        module.kept = x.shape[1]
    return module.kept


def the_rows_of_the_first_batch(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = torch.ones(()) * x.shape[0]
    return module.kept


def a_count_of_calls(module: Any, x: Tensor) -> Tensor:
    module.kept = torch.ones(()) if module.kept is None else module.kept + 1
    return module.kept


def the_first_random_numbers(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = torch.rand(4)
    return module.kept


def the_first_dropout(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = nn.functional.dropout(torch.ones(4), 0.5)
    return module.kept


def a_value_of_the_weights(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = module.first.weight.detach().sum()
    return module.kept


def a_value_of_a_buffer_that_is_saved(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = module.saved + 1
    return module.kept


def a_value_of_a_buffer_that_is_written(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = module.slopes + 1
    module.slopes += 1
    return module.kept


def the_last_of_a_buffer_that_is_not_saved(module: Any, x: Tensor) -> Tensor:
    if module.short.shape[0] != x.shape[1]:
        module.short = module.short.mean().repeat(x.shape[1]) + 1
    return module.short[:, None]


def memory_that_is_not_set(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = torch.empty(4)
    return module.kept


def a_list_that_grows(module: Any, x: Tensor) -> int:
    module.tables.setdefault("seen", []).append(torch.ones(2))
    return len(module.tables["seen"])


def a_table_of_the_longest_batch(module: Any, x: Tensor) -> Tensor:
    if module.kept is None or module.kept.shape[0] < x.shape[1]:
        module.kept = torch.linspace(0, 1, x.shape[1])
    return module.kept[: x.shape[1], None]


def a_table_of_the_mode(module: Any, x: Tensor) -> Tensor:
    if module.kept is None:
        module.kept = torch.arange(4, dtype=x.dtype) * (0.5 if module.training else 1.0)
    return module.kept


def the_last_output(module: Any, x: Tensor) -> Tensor:
    before, module.kept = module.kept, x.mean((1, 2), keepdim=True)
    return module.kept if before is None else before


STATE = [
    the_mean_of_the_first_batch,
    the_length_of_the_first_batch,
    the_sum_of_a_batch_in_a_buffer,
    the_mean_of_what_a_buffer_was,
    a_number_of_the_first_batch,
    the_rows_of_the_first_batch,
    a_count_of_calls,
    the_first_random_numbers,
    the_first_dropout,
    a_value_of_the_weights,
    a_value_of_a_buffer_that_is_saved,
    a_value_of_a_buffer_that_is_written,
    the_last_of_a_buffer_that_is_not_saved,
    memory_that_is_not_set,
    a_list_that_grows,
    a_table_of_the_longest_batch,
    a_table_of_the_mode,
    the_last_output,
]


def traced(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> tuple[Program, Reads]:
    return Tracer(model, loss_fn).trace({"x": torch.randn(6, 5, 4)}, True)


@pytest.mark.parametrize("act", CACHES)
def test_a_cache_is_captured_and_left_alone(act: Callable[[Any, Tensor], Any]) -> None:
    model = Keeping(act)
    before = dict(vars(model)), set(model._non_persistent_buffers_set)
    program, reads = traced(model)
    assert any("keeps what follows from sizes" in note for note in program.graph.notes)
    assert program.graph.batch_symbol is not None
    assert (dict(vars(model)), model._non_persistent_buffers_set) == before
    assert (model.kept, model.empty, model.tables, hasattr(model, "mask")) == (None, None, {}, False)
    assert (model.short.shape, model.saved.shape) == ((1,), (1,))
    assert reads.hold()


@pytest.mark.parametrize("act", STATE)
def test_state_is_refused_and_left_as_it_was(act: Callable[[Any, Tensor], Any]) -> None:
    model = Keeping(act)
    with pytest.raises(CaptureError, match="keeps state in Python"):
        traced(model)
    assert (model.kept, model.tables) == (None, {})


def test_what_a_loss_function_keeps_on_the_model_is_told_alike() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kept = nn.Linear(4, 4), None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = a_table_of_a_fixed_size(self, x) if self.kept is None else self.kept
            return self.layer(x) * self.kept

    program, _ = traced(Model(), lambda output, x: output.pow(2).mean())
    assert program.loss_name == "loss"


def test_what_is_kept_of_the_rows_of_a_batch_is_not_taken_for_a_cache_by_equal_rows() -> None:
    """Rows of a mask are compared by nothing: one device goes on with the first batch's, or fails."""

    def act(module: Any, x: Tensor) -> Tensor:
        if module.kept is None:
            module.kept = torch.ones(x.shape[0], 1, 1).cumsum(0)
        return module.kept.sum()

    with pytest.raises(CaptureError, match="keeps state in Python"):
        traced(Keeping(act))


def test_a_cache_that_goes_by_a_plain_value_is_told_by_other_values() -> None:
    class Model(nn.Module):
        kept = None

        def __init__(self, *, looks: bool) -> None:
            super().__init__()
            self.layer, self.looks, self.shape = nn.Linear(4, 4), looks, None

        def forward(self, x: Tensor, causal: bool) -> Tensor:
            if self.kept is None or (self.looks and self.shape != causal):
                self.kept, self.shape = torch.ones(4, 4).tril() if causal else torch.ones(4, 4), causal
            return (self.layer(x) @ self.kept).pow(2).mean()

    batch = {"x": torch.randn(6, 4), "causal": True}
    with pytest.raises(CaptureError, match="keeps state in Python"):
        Tracer(Model(looks=False), None).trace(batch, True)
    program, _ = Tracer(Model(looks=True), None).trace(batch, True)
    assert program.graph.notes


def test_a_forward_that_takes_few_sizes_is_tried_with_those_that_it_takes() -> None:
    def act(module: Any, x: Tensor) -> Tensor:
        if x.shape[1] not in (8, 16, 32):
            raise ValueError
        return the_length_of_the_first_batch(module, x)

    with pytest.raises(CaptureError, match="keeps state in Python"):
        Tracer(Keeping(act), None).trace({"x": torch.randn(6, 8, 4)}, True)


def test_a_cache_and_a_check_of_values_do_not_disturb_each_other() -> None:
    def act(module: Any, x: Tensor) -> Tensor:
        kept = a_table_of_a_fixed_size(module, x)
        if x.max() > 9:
            raise ValueError("large")
        return kept

    model = Keeping(act)
    program, _ = traced(model)
    assert len(program.checks) == 1
    assert model.kept is None


PLANS = {
    "replicas of unequal shares": Plan.data_parallel((0, 1), (3, 1)),
    "tensor parallel": Plan((Pipeline((Stage((0, 1)),)),)),
    "a group beside a device": Plan((Pipeline((Stage((0, 1), (2, 1)),), share=2), Pipeline((Stage((2,)),)))),
}


HOW = Lockstep(partial(torch.optim.SGD, lr=0.1))


def kept_in_double(act: Callable[[Any, Tensor], Any]) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return a model with weights of its own, and batches of several sizes."""
    torch.manual_seed(0)
    model = Keeping(act).double()
    return model, [{"x": torch.randn(rows, length, 4).double()} for rows, length in ((8, 5), (8, 3), (4, 7), (8, 5))]


@functools.cache
def captured_and_trained(act: Callable[[Any, Tensor], Any]) -> tuple[GraphExecution, Trained]:
    """Return what all plans have in common: the model's capture, and its training on one device."""
    model, batches = kept_in_double(act)
    alone = train_alone(model, batches, HOW)
    for name in ("mask", "empty", "short", "saved"):  # one device leaves them as it has filled them
        alone.state.pop(name, None)
    model, batches = kept_in_double(act)
    return HOW.capture(model, batches[0]), alone


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_caches_are_those_of_one_device_in_batches_of_other_sizes(plan: Plan) -> None:
    for act in CACHES:
        captured, alone = captured_and_trained(act)
        verdict = judge("plan", alone, HOW.train(*kept_in_double(act), plan, captured), 1e-10, "")
        assert verdict.verdict == "equal", (act, verdict)


STEP = 0
SEEN: dict[str, Tensor] = {}
TABLES: dict[int, Tensor] = {}


@functools.cache
def table_of(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64)


def a_count_in_a_global(module: Any, x: Tensor) -> float:
    global STEP
    STEP += 1
    return 1.0 / STEP


def a_count_on_the_class(module: Any, x: Tensor) -> float:
    Counted.count += 1
    return 1.0 / Counted.count


def a_mean_in_a_global(module: Any, x: Tensor) -> Tensor:
    if "mean" not in SEEN:
        SEEN["mean"] = x.mean()
    return SEEN["mean"]


class Counted:
    count = 0


@pytest.mark.parametrize("act", [a_count_in_a_global, a_count_on_the_class, a_mean_in_a_global])
def test_state_outside_of_the_model_is_refused_and_left_as_it_was(act: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match="keeps state in Python"):
        traced(Keeping(act))
    assert (STEP, Counted.count, SEEN) == (0, 0, {})


def test_a_cache_in_a_global_and_one_of_a_function_have_nothing_of_a_trace() -> None:
    def act(module: Any, x: Tensor) -> Tensor:
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = torch.ones(x.shape[1]).cumsum(0)
        return TABLES[x.shape[1]][:, None] * table_of(4)

    program, _ = traced(Keeping(act))
    assert program.graph.notes
    assert TABLES == {}
    assert table_of.cache_info().currsize == 0


class BiggestOf(nn.Module):
    """Goes on by a value, and has a function keep a table."""

    def forward(self, x: Tensor) -> Tensor:
        table_in_a_global(x.shape[1])
        return x * 2 if float(x.max()) > 0 else x


class KeepingBesideALeaf(Keeping):
    def __init__(self, act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(act)
        self.biggest = BiggestOf()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.biggest(x))


def table_in_a_global(length: int) -> Tensor:
    if length not in TABLES:
        TABLES[length] = torch.arange(length)
    return TABLES[length]


def test_a_cache_may_be_beside_a_leaf_whose_trial_leaves_globals_alone() -> None:
    with pytest.warns(LeafWarning, match=r"biggest \(BiggestOf\) is a leaf"):
        program, _ = traced(KeepingBesideALeaf(a_table_of_one_length))
    assert [call.label for call in program.graph.leaf_calls] == ["biggest (BiggestOf)"]
    assert any("keeps what follows from sizes" in note for note in program.graph.notes)
    assert TABLES == {}
