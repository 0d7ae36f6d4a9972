"""Ops in which rows meet have the rows of all replicas; what makes the rows keeps its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from hetu_fx.check.verdict import judge
from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import FixedRows, Graph, LeafKind, OutputKind
from hetu_fx.lockstep import Lockstep, train_alone
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.loss_type import LossType
from hetu_fx.program.program import Program, make_program
from hetu_fx.transforms.rewrites.all_rows import AllRows, gather_inputs
from hetu_fx.transforms.rewrites.global_mean import GlobalMean
from hetu_fx.transforms.rewrites.row_ops import OWN, PLACE
from hetu_fx.transforms.specialize.device_graph import GraphSlot, SlotKind
from tests.transforms.plans import device_graph, run_in_lockstep

Loss = Callable[[Tensor, Tensor], Tensor]


class Views(nn.Module):
    """Vectors of two views of each row, and a loss of them."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), self.layer(y))


def by_scores(u: Tensor, v: Tensor) -> Tensor:
    return F.cross_entropy(u @ v.t(), torch.arange(len(u)))


def by_labels(u: Tensor, v: Tensor) -> Tensor:
    labels = v.argmax(1)
    return ((labels[:, None] == labels[None]) * (u @ u.t())).mean()


def joined(u: Tensor, v: Tensor) -> Tensor:
    both = torch.cat([u, v])
    first, second = both.chunk(2)
    return (both @ both.t()).exp().sum().log() - (first * second).sum() / len(u)


def of_rows(u: Tensor, v: Tensor) -> Tensor:
    return (u - v).square().mean()


def graph_of(loss: Loss) -> Graph:
    return capture(Views(loss), {"x": torch.randn(4, 6), "y": torch.randn(4, 6)})


def program_of(loss: Loss) -> Program:
    return make_program(graph_of(loss), frozenset())


def nodes_of(graph: Graph, target: object) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.target is target]


@pytest.mark.parametrize("loss", [by_scores, by_labels, joined])
def test_no_value_has_its_own_rows_twice_and_the_batch_can_be_cut(loss: Loss) -> None:
    program = program_of(loss)
    assert program.graph.all_rows is not None
    assert program.batch_axis is not None, "rows can be spread over replicas"
    assert program.mixes_rows
    assert program.loss_type is LossType.NEITHER
    for node in filter(meta.is_tensor, program.graph.graph.nodes):
        assert sum(meta.depends_on_batch(size, program.graph) for size in meta.shape(node)) <= 1


@pytest.mark.parametrize("loss", [by_scores, by_labels, joined])
def test_unequal_replicas_together_make_the_loss_and_gradients_of_one_device(loss: Loss) -> None:
    model = Views(loss).double()
    inputs = {name: torch.randn(5, 6, dtype=torch.float64) for name in ("x", "y")}
    program = make_program(capture(model, inputs), frozenset())
    rows = {0: slice(0, 4), 1: slice(4, 5)}
    copies = {rank: {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()} for rank in rows}

    def feed(rank: int, slot: GraphSlot) -> Tensor:
        match slot.kind:
            case SlotKind.INPUT:
                return inputs[slot.name][rows[rank]]
            case SlotKind.RANDOM_STATE:
                return torch.tensor([0, 0, rows[rank].start])
            case SlotKind.COUNT:
                return torch.tensor(int(program.prologue(inputs)[program.counts.index(slot.name)]))
            case _:
                return copies[rank][slot.name]

    plan = Plan.data_parallel((0, 1), (4, 1))
    results = run_in_lockstep({rank: device_graph(program, plan, rank) for rank in rows}, feed)
    losses = [made["loss", program.loss_name] for made in results.values()]
    torch.autograd.backward(losses, [torch.ones_like(one) for one in losses])
    expected = model(**inputs)
    expected.backward()
    for one in losses:
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        total = sum((copies[rank][name].grad for rank in rows), torch.zeros(()))  # type: ignore[misc]
        torch.testing.assert_close(total, parameter.grad, rtol=1e-12, atol=1e-12)


def test_the_values_are_those_of_the_given_graph() -> None:
    given = graph_of(joined)
    made = AllRows()(given)
    values = [torch.randn(3, 6), torch.randn(3), torch.randn(5, 6), torch.randn(5, 6)]
    by_name = {"random_state": torch.tensor([0, 0, 0]), "count_rows": torch.tensor(5)}
    named = dict(zip((leaf.name for leaf in given.leaves), values, strict=True)) | by_name
    found = made.module()(*(named[leaf.name] for leaf in made.leaves))
    assert torch.allclose(found[0], given.module()(*values)[0])


def test_what_makes_the_rows_is_not_gathered() -> None:
    graph = AllRows()(GlobalMean()(graph_of(by_scores)))
    gathered = [meta.hints(node) for node in nodes_of(graph, PLACE)]
    rows = meta.hints(graph.leaves_of(LeafKind.INPUT)[0].node)[0]
    assert gathered == [(rows, 3), (3, rows)]


def test_a_loss_of_rows_is_left_as_it_is() -> None:
    given = GlobalMean()(graph_of(of_rows))
    assert AllRows()(given) is given


def test_outputs_that_begin_with_rows_are_a_replicas_own() -> None:
    class Scored(Views):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            scores = self.layer(x) @ self.layer(y).t()
            return scores.mean(), scores

    graph = AllRows()(capture(Scored(of_rows), {"x": torch.randn(4, 6), "y": torch.randn(4, 6)}))
    (own,) = nodes_of(graph, OWN)
    assert own in [node for _, node in graph.outputs_of(OutputKind.VALUE)]
    assert [meta.expression(size) for size in meta.shape(own)] == [graph.batch_symbol, graph.all_rows]


PLANS = {
    "3:1": Plan.data_parallel((0, 1), (3, 1)),
    "a replica without rows": Plan.data_parallel((0, 1), (7, 1)),
    "[0,1] beside [2]": Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)),)))),
    "tensor parallel": Plan.tensor_parallel((0, 1)),
}


class Fixed(nn.Module):
    """Sums of 2 rows each, told apart by a mask, less their deviation over all; the batch must have 4 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        pairs = x.reshape(2, 2, 6).sum(1)
        h = self.layer(pairs).tanh() * scale - self.layer(x[mask.argsort(stable=True)]).std()
        self.seen += h.detach().mean(0)
        return nn.functional.cross_entropy(h, labels[:2]) + nn.functional.cross_entropy(h, labels[2:])


def batch_of(rows: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(rows, 6, dtype=torch.float64),
        "mask": torch.arange(rows) % 3 == 0,
        "labels": torch.randint(0, 8, (rows,)),
        "scale": torch.rand(8, dtype=torch.float64),
    }


@pytest.mark.parametrize("name", PLANS)
def test_a_fixed_batch_trains_as_on_one_device(name: str) -> None:
    torch.manual_seed(1)
    model, batches, how = Fixed(), [batch_of(4), batch_of(4)], Lockstep()
    made = how.train(model, batches, PLANS[name])
    verdict = judge("", train_alone(model, batches, how), made, 1e-10, "")
    assert verdict.verdict == "equal", verdict


def test_inputs_have_a_replica_s_rows_and_what_reads_them_has_all() -> None:
    given = capture(Fixed(), batch_of(4))
    assert given.fixed_rows == FixedRows(4, {"x": 0, "mask": 0, "labels": 0})
    graph = gather_inputs(given)
    assert {leaf.name: leaf.row_dim for leaf in graph.leaves_of(LeafKind.INPUT)} == {
        "x": 0, "mask": 0, "labels": 0, "scale": None,
    }  # fmt: skip
    placed = [node for node in graph.graph.nodes if node.target is PLACE]
    assert [meta.shape(node)[0] for node in placed] == [4, 4, 4]
    assert not graph.takes_any_rows
    assert given.batch_symbol is None, "what a pass is given stays as it was"


class OfAnySize(Fixed):
    """The same for any even number of rows, which the graph fixes all the same."""

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        half = int(x.shape[0]) // 2
        pairs = torch.stack([x[i] + x[half + i] for i in range(half)])
        return nn.functional.cross_entropy(self.layer(pairs) * scale, labels[:half])


def test_a_batch_of_another_size_has_a_graph_of_its_own() -> None:
    torch.manual_seed(2)
    model, batches, how = OfAnySize(), [batch_of(4), batch_of(6), batch_of(4)], Lockstep()
    made = how.train(model, batches, PLANS["3:1"])
    assert judge("", train_alone(model, batches, how), made, 1e-10, "").verdict == "equal"


@pytest.mark.parametrize("name", PLANS)
def test_ranks_may_bring_rows_of_their_own(name: str) -> None:
    torch.manual_seed(2)
    model, batches, how = OfAnySize(), [batch_of(4), batch_of(6), batch_of(4)], Lockstep(ranks=3, rows=(3, 1, 100))
    made = how.train(model, batches, PLANS[name])
    assert judge("", train_alone(model, batches, how), made, 1e-10, "").verdict == "equal"
