"""A model is traced as if it were on the host: every type of device gets the same graph, whatever looks at it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.lockstep import move_model
from hetu_fx.program.captures import Programs
from tests.kinds.testkind import NAME, PLACE, on_testkind
from tests.model_zoo import SAMPLES


class Looks(nn.Module):
    """A forward that names devices in many ways, and reads tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)
        self.register_buffer("scale", torch.full((5,), 3.0))
        self.shift = torch.arange(5.0)

    def forward(self, x: Tensor) -> Tensor:
        made = self.head(x) * self.scale + self.shift.to(x.device)
        made = made + torch.arange(5, device=self.head.weight.device) + torch.ones(5, device=str(x.device))
        made = made + torch.arange(5.0).to(x) + torch.zeros(5).to(x.device, x.dtype) + x.new_ones(5)
        if x.device.type != "cpu":
            made = made * 1
        return made.pow(2).mean()


def text_of(graph: Graph) -> list[str]:
    nodes = graph.graph.nodes
    return [
        f"{node.name} {node.target} {node.args} {node.kwargs} {meta.value(node)}"
        for node in nodes
        if node.name != "output"
    ]


def on_place(model: nn.Module) -> nn.Module:
    there = move_model(copy.deepcopy(model), PLACE)
    if isinstance(model, Looks):
        there.shift = model.shift.to(PLACE)
    return there


@pytest.mark.parametrize("name", [*SAMPLES, "looks"])
@on_testkind
def test_a_model_has_the_graph_that_it_has_on_the_host_op_for_op(name: str) -> None:
    torch.manual_seed(0)
    model = Looks() if name == "looks" else SAMPLES[name].model()
    batch = {"x": torch.randn(7, 6)} if name == "looks" else SAMPLES[name].batch(7, 13)
    there = {key: value.to(PLACE) for key, value in batch.items()}
    assert text_of(capture(on_place(model), there)) == text_of(capture(model, batch))


@pytest.mark.parametrize("name", ["llama", "gpt2", "conv"])
@on_testkind
def test_programs_have_one_hash_on_all_types(name: str) -> None:
    model, batch = SAMPLES[name].model().double(), SAMPLES[name].batch(7, 13)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    hashes = []
    for one, values in ((model, batch), (on_place(model), {key: value.to(PLACE) for key, value in batch.items()})):
        programs = Programs(one, None)
        hashes.append(programs.name(programs.first(values, True)))
    assert hashes[0] == hashes[1]


@on_testkind
def test_constants_are_the_model_s_own_tensors_and_not_the_copies_that_were_traced() -> None:
    model = on_place(Looks())
    graph = capture(model, {"x": torch.randn(7, 6, device=PLACE)})
    (constant,) = (leaf.name for leaf in graph.leaves_of(LeafKind.CONSTANT))
    assert graph.constants[constant] is model.shift


@on_testkind
def test_the_model_is_as_it_was_after_a_capture() -> None:
    model = on_place(Looks())
    before = dict((*model.named_parameters(), *model.named_buffers()))
    capture(model, {"x": torch.randn(7, 6, device=PLACE)})
    assert all(tensor is before[name] for name, tensor in (*model.named_parameters(), *model.named_buffers()))


class Moves(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.head, self.way = nn.Linear(6, 5), way

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(5.0)
        ways = {
            "method": lambda: getattr(rows, NAME)(),
            "name": lambda: rows.to(NAME),
            "default": lambda: self._by_default(),
        }
        return (self.head(x) + ways[self.way]()).sum()

    @staticmethod
    def _by_default() -> Tensor:
        with PLACE:
            return torch.arange(5.0)


@pytest.mark.parametrize("way", ["method", "name", "default"])
@on_testkind
def test_a_device_that_a_script_names_is_the_host_in_the_trace(way: str) -> None:
    graph = capture(Moves(way).to(PLACE), (torch.randn(7, 6, device=PLACE),))
    devices = {meta.value(node).device.type for node in graph.graph.nodes if meta.is_tensor(node)}
    assert devices == {"cpu"}


class Branches(nn.Module):
    """Cannot be traced on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != NAME:
            raise NotImplementedError("only on the accelerator")
        return self.head(x).sum()


@on_testkind
def test_a_model_that_the_host_cannot_run_is_traced_where_it_is() -> None:
    graph = capture(Branches().to(PLACE), (torch.randn(7, 6, device=PLACE),))
    assert {meta.value(value).device for value in graph.output_values} == {PLACE}


@contextmanager
def casting_on(kind: str) -> Iterator[None]:
    with torch.autocast(kind, dtype=torch.bfloat16):
        yield


@on_testkind
def test_an_autocast_of_the_host_casts_nothing_of_a_model_elsewhere() -> None:
    model, x = Looks(), torch.randn(7, 6)
    with casting_on("cpu"):
        graph = capture(on_place(model), {"x": x.to(PLACE)})
    assert text_of(graph) == text_of(capture(model, {"x": x}))


def in_order(model: nn.Module, batch: dict[str, Tensor], kind: str, **changes: bool) -> tuple[str, list[str]]:
    """Return the name of the program under an autocast of this type, and the text of its graph."""
    programs = Programs(model, None, **changes)
    with casting_on(kind):
        program = programs.first(batch, True)
    return programs.name(program), text_of(program.graph)


@pytest.mark.parametrize("name", ["llama", "gpt2", "looks"])
@on_testkind
def test_where_ranks_compute_on_several_types_an_autocast_casts_on_all_what_it_casts_on_the_host(name: str) -> None:
    torch.manual_seed(0)
    model = Looks() if name == "looks" else SAMPLES[name].model()
    batch = {"x": torch.randn(7, 6)} if name == "looks" else SAMPLES[name].batch(7, 13)
    there = {key: value.to(PLACE) for key, value in batch.items()}
    plain = in_order(model, batch, "cpu")
    assert any("bfloat16" in line for line in plain[1])
    assert in_order(on_place(model), there, NAME, casts_on_host=True) == plain
    assert in_order(copy.deepcopy(model), batch, "cpu", casts_on_host=True) == plain
    assert in_order(on_place(model), there, "cpu", casts_on_host=True)[0] != plain[0], "which casts nothing there"


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(x).float().sum()


@on_testkind
def test_a_model_that_casts_is_traced_where_it_is_as_each_type_casts_other_ops() -> None:
    graph = capture(Casts().to(PLACE), (torch.randn(7, 6, device=PLACE),))
    head = next(node for node in graph.graph.nodes if str(node.target) == "aten.linear.default")
    assert (meta.value(head).device, meta.dtype(head)) == (PLACE, torch.float32)
