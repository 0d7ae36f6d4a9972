"""Ops on parts of a factor that they look across: equal to the op on the whole, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.deduction.rules.registry import RULES, find_rule
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import make_program
from hetu_fx.transforms.lowering.graph_traffic import communications
from hetu_fx.transforms.specialize.device_graph import DeviceGraph
from tests.deduction.shards import sample, trial_of
from tests.model_zoo import SAMPLES, captured, to_double
from tests.transforms.plans import program_as_one_device, program_of, same_as_one_device

TIGHT = 1e-11
SPLITS = {"even": Plan.tensor_parallel((0, 1)), "5:2": Plan.tensor_parallel((0, 1), (5, 2)),
          "3 ranks": Plan.tensor_parallel((0, 1, 2), (1, 3, 2))}  # fmt: skip
IGNORED = -100


class Classifier(nn.Module):
    """A vocabulary looked up, and as scores; 23 words, which nothing divides."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], *, tied: bool = False, **table: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 5, **table)
        self.head = nn.Linear(5, 23, bias=not tied)
        if tied:
            self.head.weight = self.table.weight
        self.loss = loss

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(self.table(words)), target)


def words(rows: int = 4, length: int = 5) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, 23, (rows, length))
    target[0, :2] = IGNORED
    return torch.randint(0, 23, (rows, length)), target


def run(model: nn.Module, plan: str, batch: tuple[Tensor, Tensor] | None = None) -> Mapping[int, DeviceGraph]:
    return same_as_one_device(model.double(), batch or words(), SPLITS[plan], limit=TIGHT)


def entropy(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda scores, target: F.cross_entropy(scores.flatten(0, 1), target.flatten(), **options)


def negative_log_likelihood(scores: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(scores, -1).flatten(0, 1), target.flatten())


def classes_second(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), target)


def each_weighed(scores: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none")
    return (each * torch.arange(len(each))).sum()


def picked_by_hand(scores: Tensor, target: Tensor) -> Tensor:
    picked = scores.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * (target != IGNORED)).sum()


def as_probabilities(scores: Tensor, target: Tensor) -> Tensor:
    return (scores.softmax(-1).pow(2).sum(-1) * (target != IGNORED)).sum()


LOSSES = {
    "mean": entropy(),
    "sum": entropy(reduction="sum"),
    "smoothed": entropy(label_smoothing=0.1),
    "a word ignored": entropy(ignore_index=7),
    "likelihood": negative_log_likelihood,
    "classes second": classes_second,
    "each": each_weighed,
    "gather": picked_by_hand,
    "softmax": as_probabilities,
}


def sends(devices: Mapping[int, DeviceGraph]) -> list[str]:
    return [node.target._opname for node in communications(devices[0])]


@pytest.mark.parametrize("plan", SPLITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_split_vocabulary_gives_the_loss_and_gradients_of_the_whole(loss: str, plan: str) -> None:
    target = words()
    if loss == "a word ignored":
        target = (target[0], target[1].clamp(min=0))
    run(Classifier(LOSSES[loss]), plan, target)


@pytest.mark.parametrize("plan", SPLITS)
def test_one_split_of_a_tied_weight_serves_table_and_scores(plan: str) -> None:
    devices = run(Classifier(entropy(), tied=True), plan)
    assert sends(devices) == ["all_reduce", "identity", "all_gather", "all_reduce"]


@pytest.mark.parametrize("padding", [0, 22])
def test_the_padding_row_gets_no_gradient_in_the_part_that_has_it(padding: int) -> None:
    run(Classifier(entropy(), padding_idx=padding), "3 ranks")


def test_scores_are_never_put_together() -> None:
    devices = run(Classifier(entropy()), "5:2")
    gathered = [node.args[3] for node in communications(devices[0]) if node.target._opname == "all_gather"]
    assert gathered == [[2, 2]]  # a peak and a sum per row and part


def test_all_targets_ignored_in_a_row_and_whole_parts_of_minus_infinity() -> None:
    def masked(scores: Tensor, target: Tensor) -> Tensor:
        scores = scores + torch.zeros(23).masked_fill(torch.arange(23) < 17, -torch.inf)
        return F.cross_entropy(scores.flatten(0, 1), target.flatten())

    batch = words()
    batch[1][:] = batch[1].clamp(min=17)
    run(Classifier(masked), "5:2", batch)


class Weighed(Classifier):
    """Words count for more or less."""

    def __init__(self) -> None:
        super().__init__(lambda scores, target: F.cross_entropy(scores.flatten(0, 1), target.flatten(), self.weights))
        self.register_buffer("weights", torch.rand(23))


def against_probabilities(scores: Tensor, target: Tensor) -> Tensor:
    wanted = F.one_hot(target.clamp(min=0), 23).to(scores.dtype) * 0.9 + 0.1 / 23
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(0, 1))


@pytest.mark.parametrize("model", [Weighed, lambda: Classifier(against_probabilities)], ids=["weighed", "probable"])
def test_losses_without_a_form_see_whole_scores(model: Callable[[], nn.Module]) -> None:
    run(model(), "5:2")


@pytest.mark.parametrize("options", [{}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_tables_with_gradients_of_a_kind_of_their_own_stay_whole(options: dict[str, bool]) -> None:
    program = program_of(Classifier(entropy(), **options), words())
    (table,) = (node for node in program.graph.graph.nodes if node.target is torch.ops.aten.embedding.default)
    assert bool(program.factors.op(table).sharded) == (not options)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("plan", ["5:2", "3 ranks"])
def test_models_with_a_split_vocabulary_equal_one_device(name: str, plan: str) -> None:
    model, graph = captured(name, dropout=False)
    program = make_program(graph, frozenset())
    program_as_one_device(program, model, to_double(SAMPLES[name].batch(4, 11)), SPLITS[plan], limit=2e-6)


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.traits.sharded])
def test_every_op_with_a_form_has_a_rule_of_its_own(name: str) -> None:
    rule = find_rule(name)
    assert rule is not None
    assert rule.op != "*.*.*"


def test_what_only_a_form_could_cut_is_whole_in_ops_without_one() -> None:
    scores, targets = torch.rand(2, 5, 3, 4), torch.zeros(2, 3, 4, dtype=torch.int64)
    ops = "aten.nll_loss_nd.default", "aten.nll_loss2d.default"
    with_form, without = (trial_of(op, sample(scores, targets)).factoring for op in ops)
    assert (with_form.sharded, with_form.whole) == ({"d1"}, frozenset())
    assert (without.sharded, without.whole) == (frozenset(), {"d1"})
