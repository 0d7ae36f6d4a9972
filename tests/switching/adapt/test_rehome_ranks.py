"""Training on four ranks goes on as if nothing had happened, whatever is switched: plans, homes, devices."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import StateError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.adapt import rehome
from hetu_fx.switching.adapt.health import HealthTracker
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.migrate.in_flight import HomeEvent
from tests.switching.eager.models import Choosy, make
from tests.switching.eager.models import batch as choosy_batch

WORLD, WIDTH, STEPS, EVERY = 4, 12, 120, 6
DATA_PARALLEL = Plan.data_parallel((0, 1, 2, 3), (3, 2, 2, 1))
TENSOR_PARALLEL = Plan.tensor_parallel((0, 1, 2, 3))
STAGES = Plan((Pipeline((Stage((0, 1), (), 3), Stage((2, 3), (), 1)), micro_batches=2),))
UNEQUAL = Plan((Pipeline((Stage((0, 1), (2, 1), 4),), share=2), Pipeline((Stage((2,), (), 4),), share=1)))
WITHOUT_0 = Plan(
    (Pipeline((Stage((3,), (), 2), Stage((1,), (), 2)), share=1), Pipeline((Stage((2,), (), 4),), share=1))
)
PLANS = {"dp": DATA_PARALLEL, "tp": TENSOR_PARALLEL, "pp": STAGES, "unequal": UNEQUAL, "without 0": WITHOUT_0}


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.1, self.training)


class Net(nn.Module):
    """Some blocks between two layers, and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return ((self.outward(x) * self.scale - y) ** 2).mean()


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True).sin()}


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def parallel(model: nn.Module, plans: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    options = {"optimizer": optimizer, "data": "global", "seed": 5, **options}
    return hetu_fx.auto_parallelize(model, data(0), plan=plans, **options), optimizer


def with_variants() -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = parallel(net(), DATA_PARALLEL)
    for name, plan in list(PLANS.items())[1:]:
        model.hetu.add_variant(plan, name)
    return model, optimizer


SWITCHES: tuple[Callable[[Any], Any], ...] = (
    lambda hetu: hetu.switch("tp"),
    lambda hetu: hetu.switch_home("tp", overlap=True),
    lambda hetu: hetu.switch("pp"),
    lambda hetu: hetu.switch_home([1, 2]),
    lambda hetu: hetu.switch("unequal"),
    lambda hetu: hetu.drain(3),
    lambda hetu: hetu.switch_home({0: 3.0, 2: 1.0}, overlap=True),
    lambda hetu: hetu.admit(3, overlap=True),
    lambda hetu: hetu.switch("variant0"),
    lambda hetu: hetu.switch_home(UNEQUAL),
    lambda hetu: hetu.drain(0),
    lambda hetu: hetu.switch_home([3], overlap=True),
    lambda hetu: hetu.admit(0),
    lambda hetu: hetu.switch("pp"),
    lambda hetu: hetu.switch_home("pp"),
    lambda hetu: hetu.switch_home([0, 1, 2, 3], overlap=True),
    lambda hetu: hetu.switch("tp"),
    lambda hetu: hetu.drain(0),
    lambda hetu: hetu.admit(0),
    lambda hetu: hetu.release(),
)


def train_on(model: Any, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    """Train on a batch, every third time without a step, so that the next one has gradients of two; give the loss."""
    loss = model(**data(number))
    loss.backward()
    if number % 3:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach() + 0


def losses(model: Any, optimizer: torch.optim.Optimizer, switches: tuple[Callable[[Any], Any], ...] = ()) -> Tensor:
    """Train, every third step with gradients of two batches; switch before every sixth batch, between those two."""
    found = []
    for number in range(STEPS):
        if switches and number % EVERY == 1:
            switches[number // EVERY](model.hetu)
        found.append(train_on(model, optimizer, number))
    return torch.stack(found)


def held(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Count the elements that this rank holds of parameters, gradients and optimizer state."""
    homes = list(model.parameters())
    state = [value for home in homes for value in optimizer.state[home].values() if isinstance(value, HomeTensor)]
    return sum(t.local.numel() for t in (*homes, *state, *(home.grad for home in homes if home.grad is not None)))


def check_a_drained_device_holds_nothing_and_does_nothing(rank: int, world: int, folder: Path) -> None:
    model, optimizer = with_variants()
    model(**data(0)).backward()
    optimizer.step()
    model.hetu.switch("tp")
    plan = model.hetu.drain(3)
    assert model.hetu.drained == (3,)
    assert (held(model, optimizer) == 0) == (rank == 3)
    assert plan.total_bytes == plan.least_bytes == sum(plan.pairs[sender, receiver] for sender, receiver in plan.pairs)
    assert 3 in {sender for sender, _ in plan.pairs}
    assert 3 not in {receiver for _, receiver in plan.pairs}
    model(**data(1)).backward()
    optimizer.step()
    assert model.hetu.current == "unequal"
    assert (held(model, optimizer) == 0) == (rank == 3)
    with pytest.raises(StateError, match=r"variant 'pp' uses devices \[3\], which are drained"):
        model.hetu.switch("pp")
    model.hetu.admit(3)
    assert held(model, optimizer) > 0
    model.hetu.switch("pp")
    model(**data(2)).backward()


def check_plans_are_made_anew_without_a_drained_device(rank: int, world: int, folder: Path) -> None:
    cluster = Cluster.on_paper((4e9, 2e9, 2e9, 2e9))
    model, optimizer = parallel(net(), "auto", cluster=cluster)
    model(**data(0)).backward()
    model.hetu.drain(1)
    optimizer.step()
    optimizer.zero_grad()
    model(**data(1)).backward()
    assert 1 not in model.hetu.plan.devices
    model.hetu.replan({0: 2.0, 1: 5.0})
    assert list(model.hetu.variants)[-1] == "without-1-slow-0x2"
    assert 1 not in list(model.hetu.variants.values())[-1].devices
    model.hetu.admit(1)
    model(**data(2)).backward()
    optimizer.step()


def check_a_device_whose_process_gets_sigterm_is_drained_before_the_next_step(
    rank: int, world: int, folder: Path
) -> None:
    model, optimizer = with_variants()
    before = signal.getsignal(signal.SIGTERM)
    model.hetu.drain_on_sigterm()
    model(**data(0)).backward()
    optimizer.step()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    model(**data(1)).backward()
    assert model.hetu.drained == (0,)
    assert model.hetu.current == "without 0"
    assert (held(model, optimizer) == 0) == (rank == 0)
    if rank > 0:
        os.kill(os.getpid(), signal.SIGTERM)
    model(**data(2)).backward()
    assert model.hetu.drained == (0,)
    assert signal.getsignal(signal.SIGTERM) is before


def check_gradients_kept_back_move_with_their_parameters(rank: int, world: int, folder: Path) -> None:
    plain = net().eval()
    model, _ = parallel(copy.deepcopy(plain), [DATA_PARALLEL])
    with model.no_sync():
        model(**data(0)).backward()
    model.hetu.switch_home([2, 0])
    model(**data(1)).backward()
    for step in range(2):
        plain(**data(step)).backward()
    for home, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(home.grad.full_tensor(), parameter.grad, rtol=1e-10, atol=1e-12)


def check_a_backward_over_a_change_of_home_is_refused_everywhere(rank: int, world: int, folder: Path) -> None:
    for plan in (DATA_PARALLEL, STAGES):
        model, _ = parallel(net(), plan)
        loss = model(**data(0))
        model.hetu.switch_home([1])
        with pytest.raises(StateError, match="home has changed between this step's forward and its backward"):
            loss.backward()
        model(**data(0)).backward()


HOMES: dict[int, tuple[Any, ...]] = {2: ("tp",), 4: ([1, 2], "pp"), 6: ({0: 3.0, 2: 1.0},), 9: ([3],), 10: ("tp",)}


def trained(overlap: bool, folder: Path) -> tuple[Any, torch.optim.Optimizer, Tensor]:
    """Train 12 steps with changes of home, twice two in a row; save right after one of them."""
    model, optimizer = with_variants()
    found = []
    for number in range(12):
        for home in HOMES.get(number, ()):
            model.hetu.switch_home(home, overlap=overlap)
        if number == 6:
            model.hetu.save(folder, optimizer=optimizer)
        found.append(train_on(model, optimizer, number))
    model.hetu.switch_home(UNEQUAL, overlap=overlap)
    return model, optimizer, torch.stack(found)


def bits(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return this rank's pieces of parameters and optimizer state, and its numbers, by name."""
    found = {}
    for name, home in model.named_parameters():
        for key, value in {"value": home.detach(), **optimizer.state[home]}.items():
            found[f"{name}/{key}"] = (value.local if isinstance(value, HomeTensor) else torch.as_tensor(value)).clone()
    return found


def check_a_change_beside_steps_is_bit_by_bit_one_at_once(rank: int, world: int, folder: Path) -> None:
    runs = [trained(overlap, folder / f"overlap {overlap}") for overlap in (False, True)]
    assert torch.equal(runs[0][2], runs[1][2])
    kinds = [[event.event for event in model.hetu.stats["homes"]] for model, _, _ in runs]
    assert kinds == [["moved"] * 7, ["moved", "arrived"] * 6 + ["moved"]]
    first, second = (bits(model, optimizer) for model, optimizer, _ in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    loaded = []
    for (model, optimizer, _), overlap in zip(runs, (False, True), strict=True):
        model.hetu.switch_home("tp", overlap=overlap)
        model.hetu.load(folder / f"overlap {overlap}", optimizer=optimizer)
        loaded.append(bits(model, optimizer))
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in first)


def check_a_snapshot_right_after_a_change_has_what_is_on_its_way(rank: int, world: int, folder: Path) -> None:
    model, optimizer = with_variants()
    model(**data(0)).backward()
    optimizer.step()
    model.hetu.switch_home("tp", overlap=False)
    expected = bits(model, optimizer)
    model.hetu.switch_home([1, 2], overlap=True)
    snapshots = model.hetu.snapshots(optimizer, folder=folder / "memory", stopped_after=None)
    snapshots.step()
    snapshots.wait()
    optimizer.step()
    model.hetu.switch_home("tp", overlap=True)
    assert snapshots.resume().source == "memory"
    assert all(torch.equal(expected[name], found) for name, found in bits(model, optimizer).items())
    snapshots.close()


def check_an_optimizer_must_be_known(rank: int, world: int, folder: Path) -> None:
    model, optimizer = parallel(net(), DATA_PARALLEL, optimizer=None)
    with pytest.raises(StateError, match="no optimizer is known"):
        model.hetu.switch_home([1])
    model(**data(0)).backward()
    optimizer.step()
    assert model.hetu.switch_home([1], optimizer=optimizer).total_bytes > 0
    assert {key for _, key in {(t.parameter, t.kind) for t in model.hetu.switch_home([2]).tensors}} == {
        "value",
        "gradient",
        "optimizer 0 exp_avg",
        "optimizer 0 exp_avg_sq",
    }


@pytest.mark.filterwarnings("ignore")
def check_what_cannot_be_is_refused_and_changes_nothing(rank: int, world: int, folder: Path) -> None:
    model, _ = parallel(net(), DATA_PARALLEL)
    for act, problem in (
        (lambda hetu: hetu.switch_home([4]), "homes are asked for on devices"),
        (lambda hetu: hetu.switch_home("none"), "there is no variant 'none'"),
        (lambda hetu: hetu.switch_home([]), "homes are asked for on devices"),
        (lambda hetu: hetu.drain(0, 1, 2, 3), "would leave none"),
        (lambda hetu: hetu.admit(2), "cannot be admitted"),
        (lambda hetu: hetu.switch_home([rank]), "ranks ask for different homes"),
    ):
        with pytest.raises(StateError, match=problem):
            act(model.hetu)
    assert model.hetu.drained == ()
    model(**data(0)).backward()
    model.hetu.drain(2)
    with pytest.raises(StateError, match=r"every variant uses one of the drained devices \[2\]"):
        model(**data(0))
    model.hetu.add_variant(Plan.data_parallel((0, 3)))
    model(**data(0)).backward()


def check_modules_that_run_as_they_are_change_homes_too(rank: int, world: int, folder: Path) -> None:
    plain = make(Choosy)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, plain)]
    everybody = Plan.data_parallel((0, 1, 2, 3))
    hetu_fx.auto_parallelize(
        model, choosy_batch(8, 0), plan=everybody, capture="eager", data="global", optimizer=optimizers[0]
    )
    model.hetu.add_variant(Plan.data_parallel((0, 2), (1, 3)))
    for step, act in enumerate((lambda: None, lambda: model.hetu.drain(1, 3), lambda: model.hetu.admit(3))):
        act()
        for trained, optimizer in zip((model, plain), optimizers, strict=True):
            trained(**choosy_batch(8, step, 3))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    for home, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(home.detach().full_tensor(), parameter.detach(), rtol=1e-10, atol=1e-12)


def follow_there_and_back(rank: int) -> None:
    """Tell of rates, of none, and of the first again once the user has placed the homes."""
    runs = (parallel(net(), "auto", cluster=Cluster.on_paper((1e6,) * 4)), parallel(net(), Plan.single()))
    model, optimizer = runs[0]
    hetu, steps = model.hetu, itertools.count()
    hetu._adaptation.tracker = HealthTracker(window=10_000, lasting=10_000, settling=10_000)  # rates are as told here

    def train(count: int) -> None:
        for number in itertools.islice(steps, count):
            losses = [trained(**data(number)) for trained, _ in runs]
            torch.testing.assert_close(*(loss + 0 for loss in losses), rtol=1e-10, atol=1e-12)
            for loss, (_, its_optimizer) in zip(losses, runs, strict=True):
                loss.backward()
                its_optimizer.step()
                its_optimizer.zero_grad()

    def adapt(rates: dict[int, float]) -> None:
        hetu._adaptation.adapt(rates)
        while hetu.is_planning:
            train(1)
        train(rehome.STAY_STEPS + 2)

    def moves() -> list[HomeEvent]:
        return [event for event in hetu.stats["homes"] if event.event == "moved"]

    train(2)
    healthy = held(model, optimizer)
    adapt({3: 8.0})
    slow = held(model, optimizer)
    assert slow < 0.25 * healthy if rank == 3 else slow > healthy
    (move,) = moves()
    assert move.why.startswith("follows 'slow-3x8', rates {3: 8.0}: ")
    assert move.num_bytes > 0
    adapt({})
    assert held(model, optimizer) == healthy
    assert len(moves()) == 2
    hetu.switch_home([0, 1])
    adapt({3: 8.0})
    assert not hetu.homes_follow
    assert len(moves()) == 3, "homes that the user has placed stay"
    hetu.homes_follow = True
    train(1)
    assert held(model, optimizer) == slow


def check_homes_and_all_that_belongs_to_them_follow_plans_for_slow_devices(rank: int, world: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehome, "STAY_STEPS", 3)
        follow_there_and_back(rank)


def check_120_steps_with_20_switches_make_the_losses_of_none(rank: int, world: int, folder: Path) -> None:
    expected = losses(*parallel(net(), Plan.single()))
    model, optimizer = with_variants()
    found = losses(model, optimizer, SWITCHES)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert float(expected[-20:].mean()) < 0.5 * float(expected[:20].mean())
    assert model.hetu.stats["switches"] >= 8


@pytest.mark.distributed
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_four_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD, 900)[name] if report]
    assert not failures, "\n".join(failures)
