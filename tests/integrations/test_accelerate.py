"""accelerate leaves a parallel model alone but for its precision, and its optimizer is found inside its wrapper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn

import hetu_fx
from hetu_fx.errors import EnvironmentProblem, StateError
from hetu_fx.integrations.accelerate import ask_for_precision, check_processes, meet, torch_optimizer

BATCH = {"x": torch.linspace(-1, 1, 24).reshape(4, 6), "y": torch.linspace(1, 2, 12).reshape(4, 3)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.layer(x)
        return {"loss": (made - y).square().mean(), "made": made}


def parallel(model: Net) -> Net:
    return hetu_fx.auto_parallelize(model, BATCH, plan=hetu_fx.Plan.single(0), outputs="all")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_a_model_that_has_had_no_batch_yet_is_refused() -> None:
    model = nn.Linear(2, 2)
    meet(model)
    with pytest.raises(StateError, match=r"before its first call(.|\n)*hint: give .* an example batch"):
        Accelerator(cpu=True).prepare(model)


def test_prepare_leaves_a_parallel_model_and_the_wrapped_optimizer_is_found() -> None:
    model = parallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, wrapped = Accelerator(cpu=True).prepare(model, optimizer)
    assert prepared is model
    assert wrapped is not optimizer
    assert torch_optimizer(wrapped) is optimizer
    assert torch_optimizer(optimizer) is optimizer


@pytest.mark.parametrize("order", ["accelerator first", "model first", "prepared before"])
def test_the_accelerators_precision_is_the_models_in_every_order(order: str) -> None:
    def run(precision: str, model: Net, make: bool) -> dict[str, torch.Tensor]:
        AcceleratorState._reset_state(True)
        if make and order == "model first":
            model = parallel(model)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        if make and order == "accelerator first":
            model = parallel(model)
        model = accelerator.prepare(model)
        if make and order == "prepared before":
            model = parallel(model)
        made: dict[str, torch.Tensor] = model(**BATCH)
        return made

    plain, made, whole = run("bf16", Net(), False), run("bf16", Net(), True), run("no", Net(), True)
    assert torch.equal(made["made"], plain["made"])
    assert not torch.equal(made["made"], whole["made"])
    assert made["made"].dtype is made["loss"].dtype is torch.float32


def test_unwrapping_a_model_takes_the_precision_off_again() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(parallel(Net()))
    low = model(**BATCH)["made"]
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert unwrapped is model
    assert torch.equal(model(**BATCH)["made"], Net()(**BATCH)["made"])
    with accelerator.autocast():
        assert torch.equal(model(**BATCH)["made"].float(), low)


def test_a_model_is_asked_once_and_not_for_eight_bits() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(parallel(Net()))
    forward = model.forward
    assert accelerator.prepare(model).forward == forward
    accelerator.state._mixed_precision = "fp8"
    with pytest.raises(StateError, match="use mixed_precision='bf16'"):
        ask_for_precision(accelerator, model)


@pytest.mark.parametrize("hook", ["fp16", "power_sgd"])
def test_a_hook_of_ddp_is_said_not_to_be_used_and_no_hook_is_not(hook: str, recwarn: pytest.WarningsRecorder) -> None:
    model = parallel(Net())
    Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)]).prepare(model)
    assert not [one for one in recwarn if "comm_hook" in str(one.message)]
    asked = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(hook))
    with pytest.warns(UserWarning, match=rf"comm_hook='{hook}'\) is not used.*\nhint: leave comm_hook out"):
        Accelerator(cpu=True, kwargs_handlers=[asked]).prepare(model)


def test_a_compiler_of_the_accelerator_is_said_not_to_be_used(recwarn: pytest.WarningsRecorder) -> None:
    model = parallel(Net())
    Accelerator(cpu=True).prepare(model)
    assert not [one for one in recwarn if "dynamo_backend" in str(one.message)]
    AcceleratorState._reset_state(True)
    with pytest.warns(UserWarning, match=r"dynamo_backend='eager'.*\nhint: pass compile= to hetu_fx.auto_parallelize"):
        Accelerator(cpu=True, dynamo_backend="eager").prepare(model)


def test_processes_that_accelerate_takes_for_the_only_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_processes(1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    check_processes(2)
    with pytest.raises(
        EnvironmentProblem, match=r"each of the 2 processes for the only one.*\nhint: .*ACCELERATE_USE_CPU=1"
    ):
        check_processes(1)
    Accelerator()
    with pytest.raises(EnvironmentProblem, match=r"Accelerator\(cpu=True\)"):
        meet(nn.Linear(2, 2))
