"""Lightning's Trainer trains under our strategy what one device trains, in every setting of `lightning_script.py`."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import BatchError, CheckpointError, EnvironmentProblem, StateError
from hetu_fx.integrations.lightning import FolderCheckpoints, HetuStrategy
from hetu_fx.integrations.lightning.strategy import Parts, check_launch, check_precision
from tests.integrations.lightning_script import SETTINGS, Inner, Outer, Runs, Scaled, Tied, rows
from tests.spawned import free_port, run

SCRIPT = str(Path(__file__).with_name("lightning_script.py"))
SECONDS = 120

by_setting = pytest.mark.parametrize("setting", SETTINGS)

pytestmark = [
    pytest.mark.timeout(3 * SECONDS),
    pytest.mark.filterwarnings("ignore"),  # of Lightning: few workers, no logger
]


@pytest.fixture(autouse=True, scope="module")
def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return what Lightning alone trains, and the folder of its files."""
    folder = tmp_path_factory.mktemp("lightning")
    runs = Runs(folder)
    return folder, {setting: getattr(runs, setting)() for setting in SETTINGS}


def assert_same(setting: str, made: Any, expected: Any) -> None:
    """Hold a setting's results against one device's: to rounding, in mixed precision to that of bfloat16."""
    if setting == "low":
        # Of the state, a bias before a batch normalization has no gradient but rounding.
        assert made["losses"] == pytest.approx(expected["losses"], abs=5e-3)
        assert made["metrics"] == pytest.approx(expected["metrics"], abs=5e-3)
    else:
        torch.testing.assert_close(made, expected, rtol=1e-8, atol=1e-9)


@by_setting
def test_one_process_trains_what_lightning_trains(setting: str, one: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = one
    assert_same(setting, getattr(Runs(folder, "alone"), setting)(), expected[setting])


def test_mixed_precision_is_another_computation(one: tuple[Path, dict[str, Any]]) -> None:
    _, expected = one
    low = expected["low"]["losses"]
    assert low == pytest.approx(expected["plain"]["losses"], abs=0.02)
    assert low != pytest.approx(expected["plain"]["losses"], abs=1e-5)


def fit(model: LightningModule, strategy: HetuStrategy | str, **options: Any) -> Trainer:
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(rows(), 4))
    return trainer


@pytest.mark.parametrize(("kind", "expected"), [(Outer, "Outer"), (Inner, "Net"), (Scaled, "Net")])
def test_what_the_training_step_calls_runs_in_parallel(kind: type[Inner], expected: str) -> None:
    model = kind().double()
    fit(model, "hetu_fx")
    assert [type(part).__name__ for part in model.modules() if "hetu" in vars(part)] == [expected]
    assert not [part for part in model.modules() if "forward" in vars(part) and "hetu" not in vars(part)]


def test_a_model_is_fitted_again_by_another_trainer() -> None:
    torch.manual_seed(3)
    model, plain = Outer().double(), Outer().double()
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        fit(model, "hetu_fx")
        fit(plain, "auto")
    torch.testing.assert_close(model.seen, plain.seen, rtol=1e-9, atol=1e-9)


def test_a_model_that_is_only_evaluated_stays_as_it_is() -> None:
    model = Outer().double()
    strategy = HetuStrategy()
    trainer = Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(model, torch.utils.data.DataLoader(rows(), 4), verbose=False)
    assert strategy.parts.parallel == ()


def test_a_checkpoint_holds_plain_tensors(tmp_path: Path) -> None:
    model = Inner().double()
    fit(model, "hetu_fx").save_checkpoint(tmp_path / "made.ckpt")
    saved = torch.load(tmp_path / "made.ckpt", weights_only=True)
    found = [
        *saved["state_dict"].values(),
        *(v for s in saved["optimizer_states"][0]["state"].values() for v in s.values()),
    ]
    assert {type(tensor) for tensor in found} == {Tensor}
    loaded = Inner.load_from_checkpoint(tmp_path / "made.ckpt", weights_only=True)
    assert torch.equal(loaded.model.up.weight, model.model.up.weight.float())


@pytest.mark.parametrize("first", ["hetu_fx", "lightning.pytorch"])
def test_the_name_is_known_whatever_is_imported_first_and_nothing_is_loaded_for_it(first: str) -> None:
    code = (
        f"import sys, {first}, hetu_fx\n"
        "from hetu_fx.integrations import patches\n"
        f"assert patches() and ('lightning' in sys.modules) is {first != 'hetu_fx'}\n"
        "from lightning.pytorch import Trainer\n"
        "assert 'hetu_fx.integrations.lightning.strategy' not in sys.modules\n"
        "print(type(Trainer(strategy='hetu_fx', accelerator='cpu', logger=False).strategy).__name__)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert made.stdout.splitlines()[-1:] == ["HetuStrategy"], made.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": None}, "takes no optimizer=: it is the one that configure_optimizers gives"),
        ({"data": "global"}, "each process reads its own rows"),
        ({"outputz": "all"}, "no argument 'outputz', did you mean 'outputs'"),
    ],
)
def test_an_option_that_is_not_the_strategys_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(StateError, match=said):
        HetuStrategy(**options)


def test_options_reach_the_parallel_module() -> None:
    model = Inner().double()
    fit(model, HetuStrategy(hetu_fx.Plan.single(0), capture="eager"))
    assert model.model.hetu.stats["captures"] == ()


def test_a_precision_with_layers_of_its_own_is_refused() -> None:
    class Layers(Precision):
        """Puts layers of its own into a model."""

    check_precision(Precision())
    with pytest.raises(StateError, match="Layers is not known to leave the model's layers as they are"):
        check_precision(Layers())


def test_devices_that_do_not_fit_the_launch_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launch(2, 1, 2)
    with pytest.raises(EnvironmentProblem, match=r"devices=2, num_nodes=2\) is for 4 processes"):
        check_launch(2, 2, 2)
    launched = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentProblem, match="the launcher has started 2"):
        Trainer(strategy="hetu_fx", accelerator="cpu", logger=False)


class Pair(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight


def test_modules_that_share_a_parameter_are_refused_by_name() -> None:
    model = Pair()
    parts = Parts(model, lambda module, batch: object.__setattr__(module, "hetu", None))
    with parts.found_by_calls():
        model.one(torch.ones(2, 3))
        with pytest.raises(StateError, match=r"'two', which shares parameter 'weight' with 'one'"):
            model.two(torch.ones(2, 3))
    assert parts.parallel == (model.one,)
    assert "forward" not in vars(model.two)


class Several(nn.Module):
    """Takes arguments of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return their sum."""
        return sum([*args, *kwargs.values()], torch.zeros(1))


class Named(Several):
    """Takes one argument, and others by name."""

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:  # type: ignore[override]
        """Return their sum."""
        return sum(others.values(), x)


def test_the_first_call_is_the_example_as_it_is_written() -> None:
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with Parts(module, lambda made, batch: object.__setattr__(made, "hetu", batch)).found_by_calls():
            module(*args, **kwargs)
        return module.hetu

    assert called(Several(), 1, 2) == (1, 2)
    assert called(Several(), x=1) == {"x": 1}
    assert called(Named(), 1, y=2) == {"x": 1, "y": 2}
    with pytest.raises(BatchError, match=r"Several takes \*args.*\(x\)\nhint: pass all of them by position"):
        called(Several(), 1, x=2)


# On two processes


@pytest.fixture(scope="module")
def two(one: tuple[Path, dict[str, Any]]) -> Path:
    """Return the folder with what two processes have trained under each plan, started by torchrun."""
    folder, _ = one
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    status, said = run(*torchrun, free_port(), SCRIPT, str(folder), "data,tensor", seconds=2 * SECONDS)
    assert status == 0, said[-4000:]
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("plan", ["data", "tensor"])
@by_setting
def test_two_processes_train_what_one_device_trains(
    setting: str, plan: str, one: tuple[Path, dict[str, Any]], two: Path
) -> None:
    for rank in range(2):
        expected = dict(one[1][setting])
        if "predicted" in expected:
            expected["predicted"] = expected["predicted"][rank::2]
        assert_same(setting, torch.load(two / f"{plan}_{setting}_{rank}.pt"), expected)


@pytest.mark.distributed
@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_one_device_goes_on_from_the_file_of_two_processes(
    plan: str, one: tuple[Path, dict[str, Any]], two: Path
) -> None:
    assert_same("resumed", Runs(two).gone_on(two / f"{plan}.ckpt"), one[1]["resumed"]["own"])


@pytest.mark.distributed
@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_lightning_alone_goes_on_from_the_folder_of_two_processes(
    plan: str, one: tuple[Path, dict[str, Any]], two: Path
) -> None:
    runs = Runs(two)
    runs.in_folders = True
    assert_same("foldered", runs.gone_on(two / f"{plan}_in_folder.ckpt", Tied), one[1]["foldered"]["own"])


def test_a_folder_takes_the_place_of_the_one_before_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    saves, state = FolderCheckpoints(), {"a": torch.arange(6.0).reshape(2, 3).t(), "more": [{"b": torch.tensor(2)}, 5]}
    for number in range(2):
        saves.save_checkpoint({**state, "number": number}, tmp_path / "made.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["made.ckpt"]
    found = saves.load_checkpoint(tmp_path / "made.ckpt", weights_only=True)
    assert (found["number"], found["more"][0]["b"].item(), found["more"][1]) == (1, 2, 5)
    assert torch.equal(found["a"], state["a"])
    with pytest.raises(CheckpointError, match="is none"):
        saves.save_checkpoint(state, "s3://bucket/made.ckpt")


@pytest.mark.distributed
def test_lightning_starts_the_processes_itself(tmp_path: Path, one: tuple[Path, dict[str, Any]]) -> None:
    status, said = run(sys.executable, SCRIPT, str(tmp_path), "data", "accumulated", seconds=SECONDS, DEVICES="2")
    assert status == 0, said[-4000:]
    for rank in range(2):
        assert_same("accumulated", torch.load(tmp_path / f"data_accumulated_{rank}.pt"), one[1]["accumulated"])
