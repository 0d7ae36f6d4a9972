"""Every pass on a small graph, before and after, against a golden text; the list of passes and what runs them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.graph.capture import capture
from hetu_fx.plans.plan import Pipeline, Plan, Schedule, Stage
from hetu_fx.transforms.layouts.analysed_graph import Analyse
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.lowering.block_modules import BlockModules
from hetu_fx.transforms.lowering.choose_algorithms import ChooseAlgorithms
from hetu_fx.transforms.lowering.overlap_products import Overlap
from hetu_fx.transforms.lowering.recompute import Recompute
from hetu_fx.transforms.lowering.recomputing_module import RecomputingModule
from hetu_fx.transforms.lowering.units import Units, plan_units
from hetu_fx.transforms.lowering.weights_later import WeightsLater
from hetu_fx.transforms.passes import DUMP_VARIABLE, PASSES, REWRITES, Pass, run_pass
from hetu_fx.transforms.rewrites.all_rows import AllRows
from hetu_fx.transforms.rewrites.counter_rng import Randomness
from hetu_fx.transforms.rewrites.counts import CountChecks
from hetu_fx.transforms.rewrites.global_mean import BatchStatistics, GlobalMean
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides, Override
from hetu_fx.transforms.rewrites.per_sequence import PerSequence
from hetu_fx.transforms.show import show_stage
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, SlotKind
from hetu_fx.transforms.specialize.place import Place
from hetu_fx.transforms.specialize.specialize import Specialize

Golden = Callable[[str, str], None]
CLASSIFIED = (torch.randn(4, 6), torch.tensor([0, 2, 1, -100]))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).sum()


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(x) @ self.head(x).t()
        return F.cross_entropy(scores, torch.arange(len(x))), scores


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, True).sum()


class Packed(nn.Module):
    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        heads, number = x.unflatten(2, (2, 3)).transpose(1, 2), (document == 0).cumsum(1)
        mask = number[:, None, :, None] == number[:, None, None]
        return F.scaled_dot_product_attention(heads, heads, heads, mask).sum()


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        if y.max() >= 3:
            raise ValueError("a label is too large")
        assert not h.isnan().any()
        return F.cross_entropy(h, y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


# Two nodes share the first block, which is computed again; another device has the second.
FIRST, SECOND = Stage((0, 1, 2, 3), (3, 1, 2, 2), blocks=1, recompute=1), Stage((4,), blocks=1)
PLAN = Plan((Pipeline((FIRST, SECOND), micro_batches=2),))
GROUP = Plan((Pipeline((Stage((0, 1, 2, 3), (3, 1, 2, 2)),)),))
"""Nothing is computed again, and no gradients of weights wait."""
LINKS = Cluster.on_paper([1e9] * 5, nodes=("a", "a", "b", "b", "b"), intra=Link(1e9), inter=Link(1e7))


def names_of(device: DeviceGraph) -> tuple[str | None, ...]:
    return tuple(slot.name if slot.kind is SlotKind.PARAMETER else None for slot in device.slots)


def chain(plan: Plan = PLAN, schedule: Schedule = "zero-bubble") -> Iterator[tuple[Pass[Any, Any], Any]]:
    """Yield the passes after the rewrites with what each is given, on rank 1 of a model of two blocks."""
    graph: Any = capture(Blocks(), (torch.randn(4, 6),), training=True)
    for rewrite in REWRITES:
        graph = rewrite(graph)
    made: list[Any] = [graph]
    for make in (
        lambda: Analyse(frozenset({"blocks.0.up.weight"})),
        lambda: Annotate(plan),
        lambda: Deduce(),
        lambda: Specialize(1),
        lambda: Place(torch.device("cuda", 0)),
        lambda: ChooseAlgorithms(Lowering(LINKS)),
        lambda: Recompute(made[2]),
        lambda: WeightsLater(schedule),
        lambda: Overlap(made[2], LINKS.with_speeds(dict.fromkeys(LINKS.ranks, 1e6))),  # products take as long as sums
        lambda: RecomputingModule(),
        lambda: BlockModules(graph.block_paths),
        lambda: Units(plan_units(graph, {leaf.name: 1 for leaf in graph.leaves}), names_of(made[-3])),
    ):
        yield make(), made[-1]
        made.append(make()(made[-1]))


def before_and_after(graph_pass: Pass[Any, Any], given: Any) -> str:
    """Show what a pass is given and what it makes; line numbers and torch's names of symbols are left out."""
    before = show_stage(given)
    text = f"before {graph_pass.name}\n\n{before}\n\nafter {graph_pass.name}\n\n{show_stage(graph_pass(given))}\n"
    return re.sub(r"\bs\d+\b", "size", re.sub(r"\.py:\d+", ".py:LINE", text))


@pytest.mark.parametrize(
    ("rewrite", "model", "batch"),
    [
        (AllRows(), Paired(), (torch.randn(4, 6),)),
        (GlobalMean(), Classifier(), CLASSIFIED),
        (BatchStatistics(), Normalized(), (torch.randn(4, 6),)),
        (CountChecks(), Checked(), (torch.randn(4, 6), torch.randint(0, 3, (4,)))),
        (Randomness(), Dropped(), (torch.randn(4, 6),)),
        (Override(OpOverrides({"aten.linear.default": "up-cast"})), Classifier(), CLASSIFIED),
        (PerSequence(), Packed(), (torch.randn(4, 5, 6), torch.arange(5).expand(4, -1).clone())),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_rewrites_make_the_golden_text(
    golden: Golden, rewrite: Pass[Any, Any], model: nn.Module, batch: tuple[Tensor, ...]
) -> None:
    golden(rewrite.name, before_and_after(rewrite, capture(model, batch, training=True)))


@pytest.mark.parametrize("name", [known.name for known in PASSES[len(REWRITES) :]])
def test_passes_after_the_rewrites_make_the_golden_text(golden: Golden, name: str) -> None:
    passes = chain(GROUP, "1f1b") if name == Overlap.name else chain()
    graph_pass, given = next(pair for pair in passes if pair[0].name == name)
    golden(name, before_and_after(graph_pass, given))


def test_every_pass_has_a_golden_text_and_a_contract() -> None:
    folder = Path(__file__).parent / "goldens"
    assert sorted(path.stem for path in folder.glob("*.txt")) == sorted(known.name for known in PASSES)
    for known in PASSES:
        text = known.__doc__ or ""
        assert re.match(r"[A-Z]", text)
        assert all(word in text for word in ("Requires: ", "Ensures: ", "->"))


def test_each_pass_takes_what_the_one_before_makes() -> None:
    for first, then in pairwise(PASSES):
        made, given = get_type_hints(first.__call__)["return"], next(iter(get_type_hints(then.__call__).values()))
        options = [one for one in get_args(made) if one is not type(None)] if get_origin(made) else [made]
        assert options == [given], f"{first.name} -> {then.name}"


def test_a_run_is_logged_by_number_and_dumped_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    graph = capture(Dropped(), (torch.randn(4, 6),), training=True)
    with caplog.at_level(logging.DEBUG, "hetu_fx.passes"):
        made = run_pass(Randomness(), run_pass(GlobalMean(), graph))
    said = [record.getMessage() for record in caplog.records if record.name == "hetu_fx.passes"]
    assert [line.split(":")[0] for line in said] == ["00 global_mean", "04 randomness"]
    assert sorted(path.name for path in (tmp_path / "rank3").iterdir()) == ["000_global_mean.txt", "001_randomness.txt"]
    assert (tmp_path / "rank3" / "001_randomness.txt").read_text() == f"{show_stage(made)}\n"
