"""Blocks that are alike are one module: the same numbers and gradients, and one that is compiled."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.transforms.lowering.block_modules import BlockModule, BlockModules
from hetu_fx.transforms.lowering.lower import Backend, lower
from hetu_fx.transforms.lowering.recompute import Recompute
from hetu_fx.transforms.lowering.recomputing_module import RecomputingModule
from hetu_fx.transforms.specialize.device_graph import SlotKind
from hetu_fx.transforms.specialize.specialize import Specialize
from tests.transforms.lowering.recorder import Recorder
from tests.transforms.plans import deduced, program_of

WIDTH = 6


class Block(nn.Module):
    def __init__(self, hidden: int, p: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Tower(nn.Module):
    def __init__(self, *hidden: int, p: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(each, p) for each in hidden)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(x)).pow(2).sum()


class Cut:
    """A model's module on one device, whole and cut at its blocks."""

    def __init__(self, model: nn.Module, recompute: int = 0) -> None:
        plan = Plan((Pipeline((Stage((0,), recompute=recompute),)),))
        example = torch.randn(4, WIDTH, dtype=next(model.parameters()).dtype)
        made = deduced(program_of(model, (example,)), plan)
        device = Recompute(made.annotated)(Specialize(0)(made))
        assert device is not None
        self.device, self.parameters = device, dict(model.named_parameters())
        self.whole = RecomputingModule()(device)
        self.cut = BlockModules(made.annotated.graph.block_paths)(self.whole)

    @property
    def blocks(self) -> list[nn.Module]:
        return [child for child in self.cut.children() if isinstance(child, BlockModule)]

    def gradients(self, function: Callable[..., Any], x: Tensor) -> list[Tensor]:
        given: Mapping[SlotKind, Callable[[str], Any]] = {
            SlotKind.PARAMETER: self.parameters.__getitem__,
            SlotKind.INPUT: lambda _: x,
            SlotKind.RANDOM_STATE: lambda _: torch.tensor([7, 3, 0]),
        }
        loss, *_ = function(*(given[slot.kind](slot.name) for slot in self.device.slots))
        return [loss.detach(), *torch.autograd.grad(loss, list(self.parameters.values()))]


def calls(cut: Cut) -> list[str]:
    return [str(node.target) for node in cut.cut.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["as it is", "compiled"])
@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("p", [0.0, 0.4], ids=["plain", "dropout"])
def test_a_module_that_is_cut_gives_the_same_numbers_and_gradients(p: float, recompute: int, backend: Backend) -> None:
    torch.manual_seed(0)
    made = Cut(Tower(8, 8, 8, p=p).double(), recompute)
    for rows in (4, 3):
        x = torch.randn(rows, WIDTH).double()
        expected, found = (made.gradients(run, x) for run in (made.whole.forward, lower(made.cut, backend)))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["plain", "dropout"])
def test_blocks_that_are_alike_are_one_module_whatever_they_draw(p: float) -> None:
    made = Cut(Tower(8, 8, 8, p=p))
    assert calls(made) == ["piece_0", "piece_1", "piece_1", "piece_1", "piece_2"]
    assert len(made.blocks) == 3


def test_blocks_that_differ_in_sizes_alone_are_one_module() -> None:
    assert calls(Cut(Tower(8, 9, 8))) == ["piece_0", "piece_1", "piece_1", "piece_1", "piece_2"]


def test_blocks_of_other_ops_are_other_modules() -> None:
    model = Tower(8, 8, 8)
    model.blocks[1].dropout = nn.Tanh()
    assert calls(Cut(model)) == ["piece_0", "piece_1", "piece_2", "piece_1", "piece_3"]


def test_blocks_whose_ops_have_other_arguments_are_other_modules() -> None:
    model = Tower(8, 8, 8, p=0.4)
    model.blocks[1].dropout.p = 0.3
    assert calls(Cut(model)) == ["piece_0", "piece_1", "piece_2", "piece_1", "piece_3"]


def test_what_is_recomputed_is_alike_where_its_ops_are() -> None:
    assert calls(Cut(Tower(8, 8, 8, 8), recompute=2)) == ["piece_0", *["piece_1"] * 2, *["piece_2"] * 2, "piece_3"]


def test_what_is_alike_is_compiled_once_also_for_another_plan() -> None:
    recorder, first, second = Recorder(), Cut(Tower(8, 8, 8)), Cut(Tower(8, 8))
    for made in (first, second):
        made.gradients(lower(made.cut, recorder), torch.randn(4, WIDTH))
    assert len(recorder.graphs) == 3 * 2, "a forward and a backward of a block, and of what stands before and after"


def test_a_model_without_blocks_stays_whole() -> None:
    made = Cut(Tower())
    assert made.cut is made.whole


def test_what_nobody_has_any_more_is_given_back_with_what_it_was_compiled_to() -> None:
    made = Cut(Tower(8, 8, 7).double())
    kept = [weakref.ref(child) for child in made.blocks]
    made.gradients(lower(made.cut, "aot_eager"), torch.randn(4, WIDTH).double())
    assert [module() for module in kept].count(None) == 0 < len(kept)
    del made
    torch.compiler.reset()
    gc.collect()
    assert [module() for module in kept].count(None) == len(kept)
