"""Outputs come back from training where each replica has its own rows, and a loss may be made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hetu_fx
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import StateError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.home.ops import full_tensor
from tests.switching.in_threads import runtime_of

Use = Callable[[Tensor, Tensor], Tensor]


class Words(nn.Module):
    """Returns logits and, as the second, the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = nn.Embedding(50, 4), nn.Linear(4, 6), nn.Linear(6, 50)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and the mean over tokens."""
        logits = self.down(self.up(self.table(ids)).relu())
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def words(rows: int, length: int) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length).mul(7 + length).remainder(50)


class Penalised(Words):
    """Returns, as the second, a number that no row has to do with."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and a penalty of weights."""
        logits, _ = super().forward(ids, labels)
        return logits, self.up.weight.square().sum()


def trained(
    plan: Plan, given: Sequence[Tensor], use: Use, make: type[Words] = Words
) -> list[tuple[Tensor, list[Tensor]]]:
    """Return the logits and the gradients of each rank, which brings rows of its own."""

    def rank(table: GroupTable) -> tuple[Tensor, list[Tensor]]:
        runtime = runtime_of(table, make(), (given[0], given[0]), plan=plan, shared=False)
        logits, loss = runtime.run((given[table.rank], given[table.rank]), {})
        use(logits, loss).backward()
        with using(table):
            return logits.detach(), [full_tensor(home.grad) for home in runtime.homes.values() if home.grad is not None]

    return run_in_threads(len(given), rank)


def alone(given: Sequence[Tensor], use: Use, make: type[Words] = Words) -> tuple[list[Tensor], list[Tensor]]:
    """Return each rank's logits, and the gradients of the mean of what all ranks make of theirs, on one device."""
    model = make()
    made = [model(ids, ids) for ids in given]
    tokens = [ids.numel() for ids in given]
    loss = sum(own * count for (_, own), count in zip(made, tokens, strict=True)) / sum(tokens)
    (sum(use(logits, loss) for logits, _ in made) / len(given)).backward()  # type: ignore[union-attr]
    return [logits.detach() for logits, _ in made], [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("sizes", [((4, 5), (4, 5)), ((4, 5), (4, 9)), ((3, 5), (4, 5))], ids=str)
@pytest.mark.parametrize("shares", [(1, 1), (3, 1)])
@pytest.mark.parametrize(
    "use",
    [
        lambda logits, loss: loss,
        lambda logits, loss: 7 * loss + logits.square().mean(),  # the first step expects 1 for the loss's gradient
        lambda logits, loss: logits.square().mean(),
    ],
    ids=["the loss", "both", "outputs alone"],
)
def test_replicas_train_by_outputs_as_one_device_does(
    use: Use, shares: tuple[int, int], sizes: tuple[tuple[int, int], ...]
) -> None:
    given = [words(*size) for size in sizes]
    outputs, gradients = alone(given, use)
    for (logits, found), own in zip(trained(Plan.data_parallel(2, shares), given, use), outputs, strict=True):
        torch.testing.assert_close(logits, own, rtol=0, atol=1e-14)
        torch.testing.assert_close(found, gradients, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shares", [(1, 1), (3, 1)])
def test_a_number_of_the_weights_alone_counts_once_beside_a_loss_made_outside(shares: tuple[int, int]) -> None:
    def use(logits: Tensor, penalty: Tensor) -> Tensor:
        return logits.square().mean() + 3 * penalty

    given = [words(3, 5), words(4, 5)]
    _, gradients = alone(given, use, Penalised)
    for _, found in trained(Plan.data_parallel(2, shares), given, use, Penalised):
        torch.testing.assert_close(found, gradients, rtol=0, atol=1e-14)


def test_a_loss_that_counts_nothing_beside_outputs_that_do_is_refused() -> None:
    given = [words(2, 3), words(2, 3)]
    with pytest.raises(StateError, match=r"gradient of the loss is 0[\s\S]*outputs=\"all\""):
        trained(Plan.data_parallel(2), given, lambda logits, loss: 0 * loss + logits.square().mean())


MICRO_BATCHES = Plan((Pipeline((Stage((0,)),), micro_batches=2),))
ELSEWHERE = {
    "several micro-batches": (MICRO_BATCHES, 1, False),
    "tensor parallel": (Plan.tensor_parallel(2), 2, False),
    "a pipeline": (Plan((Pipeline((Stage((0,)), Stage((1,)))),)), 2, False),
    "rows of all ranks": (Plan.data_parallel(2), 2, True),
}


@pytest.mark.parametrize(("plan", "ranks", "shared"), list(ELSEWHERE.values()), ids=list(ELSEWHERE))
def test_elsewhere_an_output_says_how_to_ask_for_it_when_it_is_used(plan: Plan, ranks: int, shared: bool) -> None:
    ids = words(4, 5)

    def rank(table: GroupTable) -> Any:
        runtime = runtime_of(table, Words(), (ids, ids), plan=plan, shared=shared)
        logits, loss = runtime.run((ids, ids), {})
        loss.backward()
        return logits

    for logits in run_in_threads(ranks, rank):
        with pytest.raises(StateError, match=r"output '0' was not brought back[\s\S]*outputs=\"all\""):
            logits.argmax(-1)


class Losses(Words):
    """Returns two numbers to train by, neither of which is called the loss."""

    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Return them by name."""
        _, loss = super().forward(ids, ids)
        return {"words": loss, "weights": self.up.weight.square().mean()}


def test_several_numbers_to_train_by_are_told_by_name_where_the_loss_must_be_known() -> None:
    model: Any = hetu_fx.auto_parallelize(Losses(), (words(4, 5),), plan=MICRO_BATCHES, check=False)
    with pytest.raises(StateError, match=r"which of its outputs \['words', 'weights'\] is the loss"):
        model(words(4, 5))


def test_several_numbers_to_train_by_are_what_the_script_makes_of_them_on_one_device() -> None:
    plain = Losses()
    model: Any = hetu_fx.auto_parallelize(copy.deepcopy(plain), (words(4, 5),), plan=Plan.single(), check=False)
    for one in (plain, model):
        made = one(words(4, 5))
        (made["words"] + 3 * made["weights"]).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
