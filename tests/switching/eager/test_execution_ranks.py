"""The module as it is on three ranks with unequal shares: training equals one device in float64."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import BatchError, ExportError, HetuFxError, StateError
from hetu_fx.plans.plan import Plan
from tests.switching.eager.models import (
    Choosy,
    Fails,
    Meets,
    Normed,
    Predicts,
    Told,
    batch,
    make,
    meeting,
    squared_error,
)

WORLD = 3
UNEVEN = Plan.data_parallel((0, 1), (3, 1))
EVERYBODY = Plan.data_parallel((2, 0, 1), (4, 2, 1))
Cuts = tuple[int, ...]


def parallel(model: nn.Module, plan: Any = UNEVEN, example: Any = None, check: Any = False, **options: Any) -> Any:
    """Make a model parallel as it is; it works row by row, unless that is to be tried."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = example or batch(6, 0)
        return hetu_fx.auto_parallelize(model, example, plan=plan, capture="eager", check=check, **options)


def own(whole: dict[str, Tensor], rank: int, owned: Cuts) -> dict[str, Tensor]:
    """Cut a batch: each rank brings so many rows."""
    start = sum(owned[:rank])
    return {name: tensor[start : start + owned[rank]] for name, tensor in whole.items()}


def assert_same(model: nn.Module, plain: nn.Module, *, gradients: bool = False) -> None:
    for (name, home), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        found, expected = (home.grad, parameter.grad) if gradients else (home.detach(), parameter)
        if found is None or expected is None:
            assert found is expected, f"{name}: {found} is not {expected}"
        else:
            torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-10, atol=1e-12, msg=name)


def train_both(model: Any, plain: nn.Module, rank: int, steps: list[tuple[Cuts, int]], whole: bool = False) -> None:
    """Train side by side; a step is the rows that each rank brings, and the deepest row."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.3) for m in (model, plain)]
    for number, (owned, deepest) in enumerate(steps):
        data = batch(sum(owned), number, deepest)
        expected = plain(**data)["loss"]
        loss = model(**(data if whole else own(data, rank, owned)))["loss"]
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        (2 * expected).backward()
        (2 * loss).backward()
        assert_same(model, plain, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain)


def check_training_on_shares_of_3_to_1_equals_one_device(rank: int, world: int, folder: Path) -> None:
    plain = make(Choosy)
    model = parallel(copy.deepcopy(plain))
    # Depth 2 leaves a layer out on all replicas; later only some rows use it.
    train_both(model, plain, rank, [((5, 0, 3), 2), ((2, 4, 1), 3), ((0, 0, 7), 1), ((3, 3, 2), 3)])


def check_replicas_without_rows_take_part(rank: int, world: int, folder: Path) -> None:
    plain = make(Choosy)
    model = parallel(copy.deepcopy(plain), EVERYBODY)
    train_both(model, plain, rank, [((1, 0, 0), 3), ((0, 1, 1), 3), ((3, 1, 4), 3)])
    assert model.hetu.stats["rows"] == (5, 2, 1)


def check_every_rank_may_bring_the_whole_batch(rank: int, world: int, folder: Path) -> None:
    plain = make(Choosy)
    model = parallel(copy.deepcopy(plain), EVERYBODY, data="global")
    train_both(model, plain, rank, [((3, 2, 2), 3), ((1, 0, 1), 2)], whole=True)


def check_gradients_wait_for_the_sync(rank: int, world: int, folder: Path) -> None:
    plain = make(Choosy)
    model = parallel(copy.deepcopy(plain), EVERYBODY)
    first, second = batch(6, 1, 1), batch(7, 2, 3)
    with model.no_sync():
        model(**own(first, rank, (2, 2, 2)))["loss"].backward()
    assert model.body.weight.grad is not None  # shown, and not here yet
    model(**own(second, rank, (3, 0, 4)))["loss"].backward()
    for data in (first, second):
        plain(**data)["loss"].backward()
    assert_same(model, plain, gradients=True)


def check_gradients_kept_back_come_home_at_a_change_of_plan(rank: int, world: int, folder: Path) -> None:
    plain = make(Choosy)
    model = parallel(copy.deepcopy(plain), [EVERYBODY, UNEVEN])
    first, second = batch(6, 1, 2), batch(7, 2, 1)
    with model.no_sync():
        model(**own(first, rank, (2, 2, 2)))["loss"].backward()
    model.hetu.switch("variant1")
    model(**own(second, rank, (3, 0, 4)))["loss"].backward()
    for data in (first, second):
        plain(**data)["loss"].backward()
    assert_same(model, plain, gradients=True)


def check_outputs_come_back_to_their_callers(rank: int, world: int, folder: Path) -> None:
    plain = make(Choosy)
    model = parallel(copy.deepcopy(plain), EVERYBODY, outputs="all")
    data, owned = batch(7, 1), (4, 0, 3)
    expected = own({"out": plain(**data)["out"]}, rank, owned)["out"]
    torch.testing.assert_close(model(**own(data, rank, owned))["out"], expected.detach())
    torch.testing.assert_close(model.eval()(**own(data, rank, owned))["out"], expected.detach())


def check_a_loss_may_be_computed_outside(rank: int, world: int, folder: Path) -> None:
    plain = make(Predicts)
    model = parallel(copy.deepcopy(plain), EVERYBODY)
    data = batch(9, 1, 2)
    mine = own(data, rank, (3, 3, 3))
    squared_error(model(**mine), **mine).backward()
    squared_error(plain(**data), **data).backward()
    assert_same(model, plain, gradients=True)


def check_a_loss_fn_is_weighted_like_a_loss(rank: int, world: int, folder: Path) -> None:
    plain = make(Predicts)
    model = parallel(copy.deepcopy(plain), UNEVEN, loss_fn=squared_error)
    data = batch(7, 1)
    loss, expected = model(**own(data, rank, (1, 2, 4))).loss, squared_error(plain(**data), **data)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    loss.backward()
    expected.backward()
    assert_same(model, plain, gradients=True)


def check_outputs_that_cannot_be_joined_are_refused_everywhere(rank: int, world: int, folder: Path) -> None:
    model = parallel(make(Told), EVERYBODY)
    loss, most, rows = model(**own(batch(7, 1), rank, (3, 2, 2)))
    assert loss.requires_grad
    with pytest.raises(StateError, match=r'(?s)not asked for.*outputs="all"'):
        most.item()
    with pytest.raises(StateError, match=r"output '2' is a Python value.* differs between replicas"):
        int(rows)
    with pytest.raises(StateError, match="output '2' is"):
        model.eval()(**own(batch(7, 1), rank, (3, 2, 2)))


def check_an_error_on_one_rank_is_raised_on_all(rank: int, world: int, folder: Path) -> None:
    model = parallel(make(Fails), EVERYBODY)
    data = batch(7, 1)
    data["depth"][6] = -1  # the last row: rank 1's share
    with pytest.raises(ValueError if rank == 1 else StateError, match="a negative depth"):
        model(**own(data, rank, (3, 2, 2)))
    with pytest.raises(BatchError, match=r"differ in keys|another rank"):
        model(**own(data | {"target": data["target"].float()} if rank == 2 else data, rank, (3, 2, 2)))
    model(**own(batch(7, 2), rank, (3, 2, 2)))["loss"].backward()


def check_running_statistics_are_those_of_the_first_replica(rank: int, world: int, folder: Path) -> None:
    plain = make(Normed)
    whole = {"x": batch(8, 1)["x"]}
    model = parallel(copy.deepcopy(plain), Plan.data_parallel((1, 0), (3, 1)), whole)
    model(**own(whole, rank, (2, 2, 4)))
    plain(whole["x"][:6])
    statistics = model.norm.running_mean.clone()
    if rank == 1:
        torch.testing.assert_close(statistics, plain.norm.running_mean)
    model.hetu.save(folder / "normed")
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    out = model.eval()(**own(whole, rank, (2, 2, 4)))["out"]
    expected = {"out": plain.eval()(**whole)["out"].detach()}
    torch.testing.assert_close(out, own(expected, rank, (2, 2, 4))["out"])


def check_a_checkpoint_goes_on_under_another_plan(rank: int, world: int, folder: Path) -> None:
    model = parallel(make(Choosy), UNEVEN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    others = parallel(make(Choosy), EVERYBODY)
    second = torch.optim.AdamW(others.parameters(), lr=0.05)

    def step(each: Any, update: torch.optim.Optimizer, number: int) -> None:
        each(**own(batch(8, number), rank, (3, 2, 3)))["loss"].backward()
        update.step()
        update.zero_grad()

    step(model, optimizer, 1)
    model.hetu.save(folder / "choosy", optimizer=optimizer)
    others.hetu.load(folder / "choosy", optimizer=second)
    step(model, optimizer, 2)
    step(others, second, 2)
    for left, right in zip(model.parameters(), others.parameters(), strict=True):
        torch.testing.assert_close(left.detach().full_tensor(), right.detach().full_tensor())
    with pytest.raises(ExportError):
        model.hetu.export(folder / "export")


def check_a_slower_device_gets_fewer_rows(rank: int, world: int, folder: Path) -> None:
    plain = make(Choosy)
    cluster = Cluster.on_paper((4e9, 2e9, 2e9))
    model = parallel(copy.deepcopy(plain), "auto", batch(8, 0), cluster=cluster, data="global")
    train_both(model, plain, rank, [((8, 0, 0), 3)], whole=True)
    assert model.hetu.stats["rows"] == (4, 2, 2)
    name = model.hetu.replan({0: 4.0})
    train_both(model, plain, rank, [((8, 0, 0), 3), ((9, 0, 0), 3)], whole=True)
    assert model.hetu.current == name
    assert model.hetu.stats["rows"][0] < 4


def check_a_plan_that_cuts_the_module_is_refused_everywhere(rank: int, world: int, folder: Path) -> None:
    model = parallel(make(Choosy), UNEVEN)
    with pytest.raises(HetuFxError, match="one device in one micro-batch"):
        model.hetu.add_variant(Plan.tensor_parallel((0, 1)))


def check_what_meets_in_the_batch_runs_on_all_rows(rank: int, world: int, folder: Path) -> None:
    plain = make(Meets)
    model = parallel(copy.deepcopy(plain), example=meeting(6, 0), check=True)
    (said,) = model.hetu.checks.values()
    assert "each replica runs all rows, as by rows it would be wrong" in said, said
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.3) for m in (model, plain)]
    for number, owned in enumerate([(5, 0, 3), (2, 4, 1), (0, 0, 7)]):
        data = meeting(sum(owned), number)
        torch.manual_seed(rank)  # of its own, as scripts have it that draw other rows on each rank
        before = torch.get_rng_state()
        x = own(data, rank, owned)["x"].requires_grad_()
        loss = model(x=x)["loss"]
        assert rank == 0 or torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(0)
        whole = data["x"].requires_grad_()
        expected = plain(x=whole)["loss"]
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        (2 * expected).backward()
        (2 * loss).backward()
        torch.testing.assert_close(x.grad, own({"x": whole.grad}, rank, owned)["x"] * world, rtol=1e-10, atol=1e-12)
        assert_same(model, plain, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain)
    assert model.hetu.stats["rows"] == (7, 7)
    if rank < 2:
        torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    data = meeting(5, 9)
    found, expected = model.eval()(**own(data, rank, (2, 0, 3))), plain.eval()(**data)
    torch.testing.assert_close(found["out"], own({"out": expected["out"].detach()}, rank, (2, 0, 3))["out"])
    torch.testing.assert_close(found["most"], expected["most"].detach())
    assert found["rows"] == 5
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)


def check_gradients_of_all_rows_wait_for_the_sync(rank: int, world: int, folder: Path) -> None:
    plain = make(Meets)
    model = parallel(copy.deepcopy(plain), [EVERYBODY, Plan.single(1)], meeting(6, 0), check="auto")
    plain.drop.p = model.drop.p = 0.0
    with model.no_sync():
        model(**own(meeting(6, 1), rank, (2, 2, 2)))["loss"].backward()
    model(**own(meeting(7, 2), rank, (3, 0, 4)))["loss"].backward()
    for data in (meeting(6, 1), meeting(7, 2)):
        plain(**data)["loss"].backward()
    assert_same(model, plain, gradients=True)
    model.hetu.switch("variant1")  # one device runs it: all rows are there
    model(**own(meeting(4, 3), rank, (1, 1, 2)))["loss"].backward()
    plain(**meeting(4, 3))["loss"].backward()
    assert_same(model, plain, gradients=True)


def check_a_loss_may_be_computed_outside_of_outputs_of_all_rows(rank: int, world: int, folder: Path) -> None:
    plain = make(Meets)
    plain.drop.p = 0.0
    model = parallel(copy.deepcopy(plain), EVERYBODY, meeting(6, 0), check="auto", outputs="all")
    data, owned = meeting(9, 1), (4, 2, 3)
    mine, whole = model(**own(data, rank, owned)), plain(**data)
    (mine["out"].square().sum() / 3 + mine["most"]).backward()
    (whole["out"].square().sum() / 9 + whole["most"]).backward()
    assert_same(model, plain, gradients=True)


def check_one_device_runs_what_no_plan_makes_faster(rank: int, world: int, folder: Path) -> None:
    plain = make(Meets)
    cluster = Cluster.on_paper((2e9, 4e9, 2e9))
    for check, devices in (("auto", (1,)), (False, (1, 0, 2))):
        model = copy.deepcopy(plain)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hetu_fx.auto_parallelize(model, meeting(8, 0), capture="eager", check=check, cluster=cluster)
        assert sorted(model.hetu.plan.devices) == sorted(devices)
        told = [str(one.message) for one in caught]
        alone = "device 1 alone runs the module, on all rows of the batch, as nobody has tried"
        assert any(alone in text for text in told) == (rank == 0 and check == "auto"), told


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_three_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD)[name] if report]
    assert not failures, "\n".join(failures)
