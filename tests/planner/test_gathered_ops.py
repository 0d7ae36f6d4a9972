"""What is gathered is found by op, and priced as the planner prices it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.deduction.factors.analyse import UnknownOpWarning
from hetu_fx.graph.capture import capture
from hetu_fx.graph.leaves.trace import LeafWarning
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.gathered_ops import gathered_ops
from hetu_fx.planner.price.step import predict, row_sum_seconds
from hetu_fx.planner.simulate.simulate import simulated_seconds
from hetu_fx.planner.values.gathered_op import GatheredOp
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import Program, make_program
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.deduce import Deduce
from tests.planner.examples import paper

Loss = Callable[[Tensor, Tensor], Tensor]
SHARES = Plan.data_parallel((0, 1), (3, 1))
GROUP = Plan.tensor_parallel((0, 1))
DEVICES = paper(2, 1)


class Views(nn.Module):
    """Vectors of two views of each row, and a loss of them in a module of its own."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.head = Head(loss)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.head(self.layer(x), self.layer(y))
        return loss


class Head(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.loss(u, v)


def by_scores(u: Tensor, v: Tensor) -> Tensor:
    return F.cross_entropy(u @ v.t(), torch.arange(len(u)))


def of_rows(u: Tensor, v: Tensor) -> Tensor:
    return (u - v).square().mean()


def deviation(u: Tensor, v: Tensor) -> Tensor:
    return (u.std(0) + v.std(0)).mean()


def program_of(model: nn.Module, *names: str) -> Program:
    return make_program(capture(model, {name: torch.randn(4, 6) for name in names}), frozenset())


def found(
    program: Program, plan: Plan, rows: int | None = None, cluster: Cluster | None = DEVICES
) -> tuple[GatheredOp, ...]:
    deduced = Deduce(cluster)(Annotate(plan, wants_values=False)(program.analysed))
    return gathered_ops(deduced, plan, rows, cluster)


@pytest.fixture(scope="module")
def scores() -> Program:
    return program_of(Views(by_scores), "x", "y")


def test_an_op_in_which_rows_meet_is_named_with_its_line_module_and_text(scores: Program) -> None:
    (one,) = found(scores, SHARES)
    assert (one.kind, one.op, one.path, one.rows) == ("rows", "aten.matmul.default", "head", 4)
    assert one.line.startswith("test_gathered_ops.py:")
    assert one.source == "return self.loss(u, v)"


@pytest.mark.parametrize("rows", [4, 32])
def test_the_sums_over_rows_that_the_planner_prices_are_those_of_the_ops(scores: Program, rows: int) -> None:
    costs = program_costs(scores, rows=rows, memory=False)
    plan = replace(SHARES, predicted=predict(SHARES, costs, DEVICES))
    (one,) = found(scores, plan, rows)
    assert plan.predicted is not None
    assert one.num_bytes == 2 * (2 * rows * 3 * 4) / 2, "two values, two turns, half of which each device sends"
    assert one.seconds == pytest.approx(row_sum_seconds(plan, costs, DEVICES))
    assert one.share == pytest.approx(row_sum_seconds(plan, costs, DEVICES) / plan.predicted.seconds)


def test_what_all_replicas_compute_is_priced_beside_their_shares(scores: Program) -> None:
    (few,), (many,) = found(scores, SHARES, 4), found(scores, SHARES, 400)
    assert few.repeated_seconds is not None
    assert many.repeated_seconds is not None
    assert many.repeated_seconds > 1000 * few.repeated_seconds, "scores are as many as the square of the rows"
    (alike,) = found(scores, Plan.data_parallel((0, 1)), 400, paper(2, 2))
    flops = 2 * 400 * 400 * 3
    assert alike.repeated_seconds is not None
    assert alike.repeated_seconds > 3 * flops / 2 / 2e9, "half of the product, forward and backward, and what follows"


@pytest.mark.parametrize("plan", [SHARES, Plan.data_parallel((0, 1), (1, 1))], ids=["3:1", "even"])
def test_what_all_replicas_compute_is_in_the_predicted_step(scores: Program, plan: Plan) -> None:
    costs = program_costs(scores, memory=False)
    shared = replace(costs, gathered_work=PartCosts())
    (one,) = found(scores, plan)
    steps = [predict(plan, each, DEVICES) for each in (costs, shared)]
    more, less = ([dict(device.seconds)["compute"] for device in step.devices] for step in steps)
    assert max(a - b for a, b in zip(more, less, strict=True)) == pytest.approx(one.repeated_seconds)
    assert steps[0].seconds > steps[1].seconds
    assert predict(Plan.single(), costs, DEVICES) == predict(Plan.single(), shared, DEVICES)
    assert simulated_seconds(plan, costs, DEVICES) > simulated_seconds(plan, shared, DEVICES)


def test_a_program_in_which_no_rows_meet_has_no_work_on_gathered_rows() -> None:
    assert program_costs(program_of(Views(of_rows), "x", "y"), memory=False).gathered_work == PartCosts()


class Judged(nn.Module):
    """A loss whose Python reads a value, so that no capture goes into it."""

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        scores = u @ v.t()
        if float(scores.detach().sum()) > 1e9:
            return scores.sum()
        return F.cross_entropy(scores, torch.arange(len(u)))


@pytest.fixture(scope="module")
def judged() -> Program:
    with pytest.warns(LeafWarning):
        return program_of(Views(Judged()), "x", "y")


@pytest.mark.parametrize("rows", [4, 32])
def test_a_leaf_takes_the_flops_of_its_calls_one_of_which_is_in_the_backward(judged: Program, rows: int) -> None:
    work = program_costs(judged, rows=rows, memory=False).gathered_work
    assert work.flops == pytest.approx(4 / 3 * 2 * rows * 3), "of a row"
    assert work.traffic_bytes > 4 / 3 * 2 * 4 * rows, "scores are read and made at least"


def test_a_leaf_is_counted_beside_the_rest_of_the_program(judged: Program, scores: Program) -> None:
    leaf, ops = (program_costs(one, memory=False).whole for one in (judged, scores))
    product = 2 * 4 * 3
    assert ops.flops == pytest.approx(2 * 2 * 6 * 3 + product)
    assert leaf.flops == pytest.approx(ops.flops + product / 3)
    assert leaf.num_ops > ops.num_ops - 2, "those that torch is asked for in the leaf, not one"


def test_what_a_leaf_takes_on_every_replica_is_told(judged: Program, scores: Program) -> None:
    (leaf,), (op,) = found(judged, SHARES, 400), found(scores, SHARES, 400)
    assert leaf.kind == "leaf"
    assert (leaf.repeated_seconds or 0.0) > (op.repeated_seconds or 0.0)


def test_what_replicas_make_of_their_own_rows_by_all_rows_is_not_counted_as_repeated() -> None:
    def scaled(layers: int) -> Program:
        def loss(u: Tensor, v: Tensor) -> Tensor:
            z = u / u.std(0)
            for _ in range(layers):
                z = (z @ z.new_ones(3, 3)).tanh()
            return (z - v).square().mean()

        return program_of(Views(loss), "x", "y")

    (short,), (long,) = (found(scaled(layers), SHARES, 64) for layers in (1, 5))
    assert short.op == "aten.std.dim"
    assert short.repeated_seconds == long.repeated_seconds


def test_of_devices_that_are_not_known_bytes_are_told_and_no_seconds(scores: Program) -> None:
    (one,), (priced,) = found(scores, SHARES, 8, None), found(scores, SHARES, 8)
    assert one.num_bytes == priced.num_bytes
    assert (one.seconds, one.repeated_seconds, one.share) == (None, None, None)


def test_one_pipeline_and_sums_over_rows_gather_nothing(scores: Program) -> None:
    assert found(scores, Plan.single()) == ()
    assert found(scores, GROUP) == ()
    assert found(program_of(Views(of_rows), "x", "y"), SHARES) == ()


def test_what_takes_longest_comes_first() -> None:
    def several(u: Tensor, v: Tensor) -> Tensor:
        return deviation(u[:, :1], v[:, :1]) + by_scores(u, v)

    ops = found(program_of(Views(several), "x", "y"), SHARES)
    assert len(ops) == 3
    assert ops[0].op == "aten.matmul.default"
    assert [one.seconds for one in ops] == sorted((one.seconds for one in ops), key=lambda s: -(s or 0.0))


def test_gradients_that_replicas_sum_as_each_takes_its_own_rows_again_are_counted() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            u = self.first(x)
            near = (u @ u.t()).softmax(-1) @ u
            return self.last(near).square().mean()

    program = program_of(Mixed(), "x")
    costs = program_costs(program, memory=False)
    ops = found(program, SHARES)
    assert sum(one.seconds or 0.0 for one in ops) == pytest.approx(row_sum_seconds(SHARES, costs, DEVICES))
    assert costs.row_sums.count > 1


def test_a_batch_of_one_size_is_one_row_for_the_model() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.stack([row for row in x])).square().mean()

    program = program_of(Fixed(), "x")
    assert program.graph.fixed_rows is not None
    (one,) = found(program, SHARES)
    assert (one.kind, one.op, one.line) == ("fixed batch", "the model", "")
    assert one.num_bytes > 0
    assert (one.repeated_seconds or 0.0) > 0
    assert found(program, Plan.single()) == ()


class Columns(nn.Module):
    """An op on the columns that the plan splits, between two products."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.op(self.up(x))).square().mean()


SPLIT = replace(GROUP, split=(("up.weight", 0), ("down.weight", 1)))


def test_an_op_that_needs_split_columns_whole_is_named_with_the_price_that_deduction_goes_by() -> None:
    program = program_of(Columns(lambda h: h.cumsum(-1)), "x")
    (one,) = found(program, SPLIT, 4)
    (more,) = found(program, SPLIT, 8)
    assert (one.kind, one.op) == ("whole", "aten.cumsum.default")
    assert one.num_bytes in (4 * 8 * 4 / 2, 4 * 8 * 4), "gathered, and its gradient scattered or cut"
    assert more.num_bytes == 2 * one.num_bytes
    assert one.seconds is not None
    assert more.seconds is not None
    assert one.seconds < more.seconds < 2 * one.seconds, "a message takes as long to start"


def doubled(x: Tensor) -> Tensor:
    made: Tensor = torch.ops.hetu_gathered_tests.doubled(x)
    return made


@pytest.fixture(scope="module", autouse=True)
def _an_op_without_a_rule() -> Iterator[None]:
    with torch.library._scoped_library("hetu_gathered_tests", "DEF") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: 2 * x, "CompositeExplicitAutograd")
        yield


@pytest.mark.parametrize(
    ("model", "plan", "kind"),
    [
        (Columns(doubled), SPLIT, "no rule"),
        (Views(lambda u, v: (doubled(u) - v).square().mean()), SHARES, "rows, no rule"),
    ],
    ids=["columns", "rows"],
)
def test_of_an_op_without_a_rule_the_cure_is_a_rule(model: nn.Module, plan: Plan, kind: str) -> None:
    names = ("x",) if isinstance(model, Columns) else ("x", "y")
    with pytest.warns(UnknownOpWarning):
        program = program_of(model, *names)
    ops = {one.op: one for one in found(program, plan)}
    one = ops.pop("hetu_gathered_tests.doubled.default")
    assert one.kind == kind
    assert "register_rule" in one.cure
    assert (one.seconds or 0.0) > 0
    assert [*ops] == (["aten.sub.Tensor"] if kind.startswith("rows") else []), "which reads it beside other rows"


def test_micro_batches_send_in_turn() -> None:
    program = program_of(Columns(lambda h: h.cumsum(-1)), "x")
    parted = replace(SPLIT, pipelines=(Pipeline((Stage((0, 1)),), micro_batches=4),))
    (one,), (several,) = found(program, SPLIT, 8), found(program, parted, 8)
    assert one.num_bytes == several.num_bytes
    assert (several.seconds or 0.0) > (one.seconds or 0.0)


def test_an_op_that_is_cut_is_not_named() -> None:
    assert found(program_of(Columns(torch.relu), "x"), SPLIT) == ()
