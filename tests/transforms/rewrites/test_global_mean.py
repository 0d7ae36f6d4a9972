"""Means over rows become sums over global counts: the parts of a batch add up to the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetu_fx.graph.bind import Batch, input_tensors
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind
from hetu_fx.transforms.rewrites.counts import extract_prologue
from hetu_fx.transforms.rewrites.global_mean import MEAN, GlobalMean
from tests.graph.compare import assert_same_as_eager, gradients, loss_of, run_on_one_device
from tests.model_zoo import SAMPLES, captured, example, to_double

aten = torch.ops.aten
CROSS_ENTROPY = aten.cross_entropy_loss.default


def counts_of(graph: Graph, *batches: Batch) -> dict[str, torch.Tensor]:
    """The global counts of some batches, as the runtime feeds them."""
    prologue = extract_prologue(graph)
    local = [prologue(input_tensors(graph, batch)) for batch in batches]
    totals = [sum(column) for column in zip(*local, strict=True)]
    leaves = graph.leaves_of(LeafKind.COUNT)
    return {
        leaf.name: torch.tensor(total, dtype=leaf.node.meta["val"].dtype)
        for leaf, total in zip(leaves, totals, strict=True)
    }


def cut(batch: dict[str, torch.Tensor], *rows: int) -> list[dict[str, torch.Tensor]]:
    pieces = {name: value.split(list(rows)) for name, value in batch.items()}
    return [{name: piece[i] for name, piece in pieces.items()} for i in range(len(rows))]


def assert_parts_add_up(
    model: nn.Module, graph: Graph, batch: dict[str, torch.Tensor], rows: list[int], tolerance: float = 1e-12
) -> None:
    """Run parts of the batch on their own: losses and gradients must sum to those of the whole batch."""
    whole = model(**batch)
    wanted_loss = whole if isinstance(whole, torch.Tensor) else whole["loss"]
    wanted = gradients(model, wanted_loss)
    parts = cut(batch, *rows)
    counts = counts_of(graph, *parts)
    losses = [loss_of(run_on_one_device(graph, model, part, counts)) for part in parts]
    found = gradients(model, torch.stack(losses).sum())
    assert torch.allclose(sum(losses), wanted_loss, rtol=max(tolerance, 1e-7), atol=0)  # HF casts to float32
    for name, gradient in wanted.items():
        if gradient is not None:
            assert torch.allclose(found[name], gradient, rtol=tolerance, atol=tolerance), name


@functools.cache
def rewritten(name: str) -> tuple[nn.Module, Graph]:
    model, graph = captured(name, dropout=False)
    if name == "conv":  # whose rows meet in its statistics when it trains
        graph = capture(model.eval(), example(name), training=False)
    return model, GlobalMean()(graph)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(("rows", "length"), [(5, 11), (4, 17)])
def test_with_its_own_counts_the_graph_is_the_model(name: str, rows: int, length: int) -> None:
    model, graph = rewritten(name)
    batch = to_double(SAMPLES[name].batch(rows, length))
    assert_same_as_eager(model, graph, batch, 2e-6, counts_of(graph, batch))
    assert not graph.notes or name in ("llama", "gpt2", "t5", "mixtral")


@pytest.mark.parametrize("name", sorted(set(SAMPLES) - {"mixtral"}))
def test_unequal_parts_add_up_to_the_whole_batch(name: str) -> None:
    model, graph = rewritten(name)
    batch = to_double(SAMPLES[name].batch(7, 11))
    assert_parts_add_up(model, graph, batch, [3, 1, 2, 1], 1e-6 if name != "conv" else 1e-12)


class Head(nn.Module):
    """A linear layer and a loss."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(x), y)


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25, 3.0], dtype=torch.float64)


def divided_by_sizes(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels, reduction="sum") / (labels.shape[0] * 2) + scores.sum() / scores.shape[0]


def divided_by_a_mask(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    valid = (labels != 3).to(scores.dtype)
    return (scores.logsumexp(-1) * valid).sum() / valid.sum().clamp(min=1)


CLASS_LOSSES = {
    "cross_entropy": F.cross_entropy,
    "ignored": lambda s, y: F.cross_entropy(s, y, ignore_index=3),
    "smoothed": lambda s, y: F.cross_entropy(s, y, label_smoothing=0.1, ignore_index=3),
    "weighted": lambda s, y: F.cross_entropy(s, y, weight=WEIGHTS, ignore_index=3),
    "weighted_and_smoothed": lambda s, y: F.cross_entropy(s, y, WEIGHTS, ignore_index=3, label_smoothing=0.1),
    "probabilities": lambda s, y: F.cross_entropy(s, F.one_hot(y, 5).to(s.dtype)),
    "nll": lambda s, y: F.nll_loss(F.log_softmax(s, -1), y, ignore_index=3),
    "two": lambda s, y: F.cross_entropy(s, y) + F.cross_entropy(s * 2, y),
    "sizes": divided_by_sizes,
    "mask": divided_by_a_mask,
}
DENSE_LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda s, y: F.smooth_l1_loss(s, y, beta=0.5),
    "huber": lambda s, y: F.huber_loss(s, y, delta=0.5),
    "bce": lambda s, y: F.binary_cross_entropy_with_logits(s, y.sigmoid(), pos_weight=WEIGHTS),
    "kl_batch_mean": lambda s, y: F.kl_div(s.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "mean": lambda s, y: (s - y).pow(2).mean(),
    "mean_of_means": lambda s, y: (s - y).pow(2).mean(-1).mean(),
    "mean_over_rows": lambda s, y: (s * y).mean(0).sum(),
}


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_class_losses_add_up(name: str) -> None:
    model = Head(CLASS_LOSSES[name]).double()
    batch = {"x": torch.randn(6, 6, dtype=torch.float64), "y": torch.tensor([0, 3, 2, 3, 4, 1])}
    graph = GlobalMean()(capture(model, batch))
    assert graph.leaves_of(LeafKind.COUNT), graph.notes
    assert_parts_add_up(model, graph, batch, [1, 2, 3])


@pytest.mark.parametrize("name", DENSE_LOSSES)
def test_dense_losses_add_up(name: str) -> None:
    model = Head(DENSE_LOSSES[name]).double()
    batch = {"x": torch.randn(6, 6, dtype=torch.float64), "y": torch.randn(6, 5, dtype=torch.float64)}
    graph = GlobalMean()(capture(model, batch))
    assert graph.leaves_of(LeafKind.COUNT), graph.notes
    assert_parts_add_up(model, graph, batch, [1, 2, 3])


def test_losses_over_the_same_labels_share_a_count() -> None:
    batch = {"x": torch.randn(4, 6), "y": torch.tensor([0, 3, 2, 1])}
    graph = GlobalMean()(capture(Head(CLASS_LOSSES["two"]), batch))
    assert len(graph.leaves_of(LeafKind.COUNT)) == 1


def test_no_label_at_all_gives_nan_as_torch_does() -> None:
    batch = {"x": torch.randn(4, 6), "y": torch.full((4,), 3)}
    model = Head(CLASS_LOSSES["ignored"])
    graph = GlobalMean()(capture(model, batch))
    assert loss_of(run_on_one_device(graph, model, batch, counts_of(graph, batch))).isnan()


def test_a_part_without_labels_adds_nothing() -> None:
    model = Head(CLASS_LOSSES["ignored"]).double()
    batch = {"x": torch.randn(4, 6, dtype=torch.float64), "y": torch.tensor([3, 3, 2, 1])}
    graph = GlobalMean()(capture(model, batch))
    assert_parts_add_up(model, graph, batch, [2, 2])


def test_half_precision_sums_do_not_overflow() -> None:
    model = Head(lambda s, y: F.mse_loss(s * 200, y)).to(torch.float16)
    batch = {"x": torch.ones(64, 6, dtype=torch.float16), "y": torch.zeros(64, 5, dtype=torch.float16)}
    graph = GlobalMean()(capture(model, batch))
    loss = loss_of(run_on_one_device(graph, model, batch, counts_of(graph, batch)))
    assert loss.dtype is torch.float16
    assert torch.allclose(loss, model(**batch), rtol=1e-2)


def test_means_over_other_dims_stay() -> None:
    model = Head(lambda s, y: (s - y).mean(-1).sum())
    graph = capture(model, {"x": torch.randn(4, 6), "y": torch.randn(4, 5)})
    assert any(node.target is aten.mean.dim for node in GlobalMean()(graph).graph.nodes)
    assert not GlobalMean()(graph).leaves_of(LeafKind.COUNT)


def test_labels_that_the_model_makes_are_counted_in_the_graph() -> None:
    model = Head(lambda s, y: F.cross_entropy(s, (s.detach() + y).argmax(-1)))
    graph = GlobalMean()(capture(model, {"x": torch.randn(4, 6), "y": torch.randn(4, 5)}))
    assert not graph.leaves_of(LeafKind.COUNT)
    assert all(node.args[4] != MEAN for node in graph.graph.find_nodes(op="call_function", target=CROSS_ENTROPY))


def test_counts_that_depend_on_other_counts_are_not_added_up_before_the_step() -> None:
    def of_rare_classes(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = F.one_hot(labels, 5).sum(0).to(scores.dtype)
        return F.cross_entropy(scores, labels, weight=1 / (each + 1))

    graph = GlobalMean()(capture(Head(of_rare_classes), {"x": torch.randn(4, 6), "y": torch.tensor([0, 3, 2, 3])}))
    assert not graph.leaves_of(LeafKind.COUNT)


def test_the_given_graph_is_left_as_it_was() -> None:
    _, graph = rewritten("llama")
    before = str(graph.graph)
    GlobalMean()(graph)
    assert str(graph.graph) == before


def test_counts_are_outputs_in_the_order_of_their_leaves() -> None:
    _, graph = rewritten("mixtral")
    names = [leaf.name for leaf, _ in graph.outputs_of(OutputKind.COUNT)]
    assert names == [leaf.name for leaf in graph.leaves_of(LeafKind.COUNT)]
    assert "count_rows" in names


def test_counts_of_sizes_alone_are_told_from_those_of_values() -> None:
    class Labelled(nn.Module):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x, labels)

    def prologue_of(model: nn.Module, **batch: torch.Tensor) -> Any:
        return extract_prologue(GlobalMean()(capture(model, batch)))

    squared = Head(lambda made, y: (made - y).pow(2).mean())
    assert not prologue_of(squared, x=torch.randn(4, 6), y=torch.randn(4, 5)).reads_values
    assert prologue_of(Labelled(), x=torch.randn(6, 3), labels=torch.zeros(6, dtype=torch.long)).reads_values
