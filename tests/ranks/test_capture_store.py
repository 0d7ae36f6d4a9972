"""What one process has captured, another takes; and only where it would have captured the same."""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import Enum
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from hetu_fx.base.torch_private import storage_key
from hetu_fx.program import tracer
from hetu_fx.program.captures import Programs
from tests.end_to_end.cells import LOSS_FNS, STEPS, make_batch, make_model
from tests.ranks import remembered, stored_graphs
from tests.ranks.capture_store import FOLDER, Identity, OnlyItselfError, told


class Scaled(nn.Module):
    """Reads a number and a buffer."""

    def __init__(self, factor: float, offset: float = 0.0) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), factor
        self.register_buffer("offset", torch.full((4,), offset))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.factor + self.offset).sum()


class Asking(nn.Module):
    """Asks an object that is equal to itself only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.asked = nn.Linear(4, 4), object()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * (self.asked is not None)


BATCH = {"x": torch.ones(6, 4)}


def count_captures(*models: nn.Module) -> int:
    """Return how often models are captured here."""
    count, capture = 0, tracer.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return capture(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched, remembered.remembered_captures():
        patched.setattr(tracer, "capture", counted)
        patched.setattr(remembered, "_known", {})
        for model in models:
            Programs(model, None).first(BATCH, True)
    return count


@pytest.fixture
def in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Give what counts the captures of models in a process that shares captures with this one."""
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def count(*models: nn.Module) -> int:
        context = get_context("fork")
        counts = context.SimpleQueue()
        process = context.Process(target=lambda: counts.put(count_captures(*models)))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        return counts.get()

    return count


def test_what_another_process_has_captured_is_taken(in_another_process: Any) -> None:
    assert in_another_process(Scaled(2.0)) == 1
    assert count_captures(Scaled(2.0), Scaled(2.0)) == 0


@pytest.mark.parametrize("unlike", [Scaled(3.0), Scaled(2.0, 1.0).double(), Scaled(2.0).requires_grad_(False)])
def test_a_model_that_is_not_equal_is_captured(in_another_process: Any, unlike: nn.Module) -> None:
    assert in_another_process(Scaled(2.0)) == 1
    assert count_captures(unlike) == 1


def test_classes_of_one_name_with_other_code_are_not_equal(in_another_process: Any) -> None:
    class Other(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) * self.factor - self.offset).sum()

    Other.__qualname__ = Scaled.__qualname__
    assert in_another_process(Scaled(2.0)) == 1
    assert count_captures(Other(2.0)) == 1


def test_what_depends_on_an_object_is_not_kept(in_another_process: Any) -> None:
    assert in_another_process(Asking()) == 1
    assert count_captures(Asking()) == 1


@pytest.mark.parametrize("model", ["conv", "gpt2", "mixtral"])
def test_a_graph_is_read_as_it_was_written(model: str) -> None:
    batch = make_batch(model, STEPS[0], 0)
    graph = Programs(make_model(model), LOSS_FNS.get(model)).tracer.source(batch, True)
    read = stored_graphs.from_bytes(stored_graphs.to_bytes(graph))
    assert str(read.graph) == str(graph.graph)
    for one, other in zip(read.graph.nodes, graph.graph.nodes, strict=True):
        assert (one.target, one.meta.keys()) == (other.target, other.meta.keys())
        assert described(one.meta.get("val")) == described(other.meta.get("val"))


def described(value: Any) -> str:
    """Tell what there is of an example."""
    if isinstance(value, Tensor):
        return f"{value!r} {value.stride()} {value.storage_offset()} {value.requires_grad} {value.device}"
    return repr(value)


def test_views_of_one_memory_still_are() -> None:
    sizes = ShapeEnv()
    with FakeTensorMode(shape_env=sizes):
        rows = sizes.create_symbol(4, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
        whole = torch.empty(sizes.create_symintnode(rows, hint=4), 6)
        values = whole, whole[1:].t(), whole.view(torch.int32), torch.empty(4, 6)
    read = stored_graphs.from_bytes(stored_graphs.to_bytes(values))
    assert list(map(described, read)) == list(map(described, values))
    assert len({storage_key(value.untyped_storage()) for value in read[:3]}) == 1
    assert storage_key(read[3].untyped_storage()) != storage_key(read[0].untyped_storage())
    assert read[0].shape[0].node.shape_env is read[2].shape[0].node.shape_env is not sizes
    assert bool(read[0].shape[0] == 4), "the example's size is known"


class Kind(Enum):
    """Two of a kind."""

    ONE = 1
    OTHER = 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, "a"), (1, "b")),
        (1, True),
        (Kind.ONE, Kind.OTHER),
        (torch.float32, torch.float64),
        (torch.sum, torch.mean),
        (Tensor.float, Tensor.double),
        (lambda x: x + 1, lambda x: x + 2),
        (frozenset({1, 2}), frozenset({1})),
        (Scaled, Asking),
        (operator.attrgetter, operator.itemgetter),
        (property(lambda it: 1), property(lambda it: 2)),
    ],
)
def test_texts_of_unlike_values_are_unlike(one: Any, other: Any) -> None:
    assert told(one) == told(one)
    assert told(one) != told(other)


def test_functions_are_told_with_what_they_have_from_outside() -> None:
    def made(number: int) -> Callable[[], int]:
        return lambda: number

    assert told(made(1)) == told(made(1))
    assert told(made(1)) != told(made(2))


@pytest.mark.parametrize("value", [object(), Identity(1), [1], (1, object())])
def test_what_is_equal_to_itself_only_has_no_text(value: Any) -> None:
    with pytest.raises(OnlyItselfError):
        told(value)
