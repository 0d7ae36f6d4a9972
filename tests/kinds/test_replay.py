"""What a device computes in a step is recorded and replayed, and trains as without; all else runs as it is."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import EnvironmentProblem, StateError
from hetu_fx.transforms.lowering.replay import CALLS_BEFORE
from tests.kinds import testkind
from tests.kinds.testkind import PLACE, on_testkind


class Net(nn.Module):
    """Two layers; `p` of what is between is dropped."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(3, 8), nn.Linear(8, 1), nn.Dropout(p)
        self.unused = nn.Parameter(torch.ones(2))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        made = self.down(self.drop(torch.tanh(self.up(x))))
        return {"loss": ((made - y) ** 2).mean(), "made": made}


def data(step: int, rows: int = 4) -> dict[str, Tensor]:
    x = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.sum(1, keepdim=True).sin()}


def there(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(PLACE) for name, value in given.items()}


def nets(p: float = 0.0) -> tuple[nn.Module, nn.Module]:
    """Return a model on the host, and the same one on the kind, which replays."""
    torch.manual_seed(0)
    plain = Net(p)
    ours = copy.deepcopy(plain).to(PLACE)
    return plain, hetu_fx.auto_parallelize(
        ours, there(data(0)), plan=hetu_fx.Plan.data_parallel((0,)), options=hetu_fx.Options(cuda_graphs=True)
    )


Loop = Callable[[nn.Module, Callable[[int], dict[str, Tensor]]], list[Tensor]]


def a_usual_loop(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> list[Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(8):
        loss = model(**batch(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def gradients_that_add_up(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(8):
        loss = model(**batch(step))["loss"]
        loss.backward()
        losses.append(loss)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def two_forwards_before_their_backwards(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(6):
        first, second = (model(**batch(2 * step + more))["loss"] for more in range(2))
        (second * 2).backward()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [first.detach(), second.detach()]
    return losses


def a_graph_that_is_kept(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> list[Tensor]:
    found = []
    for step in range(6):
        loss = model(**batch(step))["loss"]
        some = [p for name, p in model.named_parameters() if name != "unused"]
        first = torch.autograd.grad(loss, some, retain_graph=True)
        second = torch.autograd.grad(3 * loss, some)
        found += [loss.detach(), *first, *second]
    return found


def outputs_that_are_kept(model: nn.Module, batch: Callable[[int], dict[str, Tensor]]) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        return [model(**batch(step))["made"] for step in range(8)]


def outputs_in_inference_mode_and_then_without_gradients(
    model: nn.Module, batch: Callable[[int], dict[str, Tensor]]
) -> list[Tensor]:
    model.eval()
    with torch.inference_mode():
        first = [model(**batch(step))["made"] for step in range(6)]
    with torch.no_grad():
        return [*first, *(model(**batch(step))["made"] for step in range(6))]


@pytest.mark.parametrize(
    "loop",
    [
        a_usual_loop,
        gradients_that_add_up,
        two_forwards_before_their_backwards,
        a_graph_that_is_kept,
        outputs_that_are_kept,
        outputs_in_inference_mode_and_then_without_gradients,
    ],
)
@on_testkind
def test_loops_train_as_on_one_device(loop: Loop) -> None:
    plain, ours = nets()
    expected, found = loop(plain, data), loop(ours, lambda step: there(data(step)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=1e-12)
    assert testkind.replayed[testkind.NAME] > 0
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-12, atol=1e-12)


@on_testkind
def test_sizes_that_come_again_are_recorded_each_and_others_run_as_they_are() -> None:
    plain, ours = nets()
    for step in range(4 * CALLS_BEFORE):
        rows = 4 if step % 3 else 5 + step
        assert torch.equal(ours(**there(data(step, rows)))["loss"].cpu(), plain(**data(step, rows))["loss"])
    assert testkind.replayed[testkind.NAME] == 8 - CALLS_BEFORE


@on_testkind
def test_new_values_of_parameters_are_read_where_they_are() -> None:
    plain, ours = nets()
    for step in range(CALLS_BEFORE + 3):
        with torch.no_grad():
            for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
                one.mul_(1.1)
                other.mul_(1.1)
        assert torch.equal(ours(**there(data(step)))["loss"].cpu(), plain(**data(step))["loss"])
    assert testkind.replayed[testkind.NAME] == 3


@on_testkind
def test_memory_of_records_goes_with_the_last_of_them_and_another_model_s_are_elsewhere() -> None:
    for _ in range(2):
        plain, ours = nets()
        found, expected = a_usual_loop(ours, lambda step: there(data(step))), a_usual_loop(plain, data)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=1e-12)
        del ours
        gc.collect()
    assert testkind.replayed[testkind.NAME] == 2 * 2 * (8 - CALLS_BEFORE)


@on_testkind
def test_a_step_that_cannot_be_recorded_is_refused() -> None:
    _, ours = nets()
    assert testkind.RECORD.graphs is not None
    graphs = testkind.RECORD.graphs()
    graphs.graph_pool_handle = lambda: -1
    with pytest.raises(
        EnvironmentProblem, match=r"a step cannot be recorded: pool -1 is gone\nhint: leave cuda_graphs out"
    ):
        a_usual_loop(ours, lambda step: there(data(step)))


@on_testkind
def test_a_model_that_drops_runs_without_and_says_why() -> None:
    _, ours = nets(p=0.5)
    with pytest.warns(UserWarning, match=r"runs without, as hetu\.dropout\.default draws random numbers"):
        ours(**there(data(0)))
    for step in range(CALLS_BEFORE + 1):
        ours(**there(data(step)))
    assert testkind.replayed[testkind.NAME] == 0


def test_on_the_host_nothing_is_recorded_and_a_warning_says_so() -> None:
    ours = hetu_fx.auto_parallelize(Net(), data(0), options=hetu_fx.Options(cuda_graphs=True))
    with pytest.warns(UserWarning, match="devices of type 'cpu' record nothing"):
        ours(**data(0))


def test_modules_that_run_themselves_are_not_recorded() -> None:
    with pytest.raises(StateError, match="cuda_graphs=True is for captured graphs"):
        hetu_fx.auto_parallelize(Net(), data(0), options=hetu_fx.Options(cuda_graphs=True), capture="eager")
