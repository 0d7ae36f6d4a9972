"""Models of published libraries: ten of them are as on one device; and what the benchmark makes of what it finds.

They come by the extra `zoo`, which tests do not need: what is not installed is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.families import page
from benchmarks.families.cells import AS_RANKS, LIMITS, PLANS, Subject
from benchmarks.families.family import Family
from benchmarks.families.processes import SILENCE, WORLD, of_ranks, try_as_processes
from benchmarks.families.trials import (
    CRASH,
    NOT_PLAIN,
    REFUSED,
    RIGHT,
    WRONG,
    Verdict,
    Way,
    in_lockstep,
    tried,
    verdict,
)
from benchmarks.kit.forks import Tell
from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import beyond
from benchmarks.zoo.libraries import LIBRARIES, Library
from tests.ranks.capture_store import FOLDER as CAPTURES

SELECTION = {
    "timm: mlp_mixer.MlpMixer": "TP2",
    "timm: eva02_tiny_patch14_224": "DP 3:1",
    "torchvision: vit": "PP2",
    "diffusers: PriorTransformer": "DP 3:1",
    "segmentation_models: JaccardLoss": "DP 3:1",
    "monai: FocalLoss": "DP 3:1",
    "x-transformers: use_rmsnorm": "TP2",
    "neuraloperator: FNO (no grid)": "DP 3:1",
    "PyG: DenseGCNConv": "TP2 + TP1",
    "PyG: DenseGINConv": "PP2",
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


class Ending(Small):
    """A model of which one rank's process ends in the middle of its capture."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting() and dist.is_initialized() and dist.get_rank() == 1:
            os._exit(1)
        return super().forward(x)


def asked(log: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(seconds=300.0, log=log, resume=True)


def refuse(family: Family, plans: Sequence[str], seconds: float, tell: Tell) -> None:
    raise AssertionError("what is in the log is not tried again")


def options(*only: str, shard: str = "1/1", plan: Sequence[str] = ()) -> argparse.Namespace:
    return argparse.Namespace(only=list(only), quick=False, shard=shard, plan=plan)


def of(library: str, *names: str) -> list[Family]:
    return [Family(f"{library}: {name}", library, lambda: None, lambda rows, length: {}) for name in names]


@pytest.fixture
def two_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for libraries: one that is there, and one that is not."""
    there, absent = Library("there", ("json",), ""), Library("absent", ("no_such_module",), "")
    monkeypatch.setattr(zoo, "LIBRARIES", {"there": there, "absent": absent})
    monkeypatch.setattr(Library, "made", lambda self: of(self.distribution, "a", "b", "c"))


@pytest.mark.parametrize("name", SELECTION)
def test_a_model_of_a_library_trains_as_on_one_device(name: str) -> None:
    library = LIBRARIES[name.partition(":")[0]]
    if library.missing:
        pytest.skip(f"{', '.join(library.missing)} is not installed: pip install 'hetu-fx[zoo]'")
    subject = Subject(next(family for family in library.made() if family.name == name))
    subject.capture()
    found = subject.try_plan(SELECTION[name])
    assert max(found.values()) <= max(LIMITS[subject.family.dtype])


@pytest.mark.usefixtures("two_libraries")
@pytest.mark.parametrize(
    ("only", "shard", "names"),
    [
        ((), "1/1", ["there: a", "there: b", "there: c"]),
        (("there: b",), "1/1", ["there: b"]),
        (("absent: *",), "1/1", []),
        (("*: [ab]",), "2/2", ["there: b"]),
    ],
)
def test_models_are_chosen_by_name_and_shard(only: Sequence[str], shard: str, names: list[str]) -> None:
    assert [family.name for family in zoo.chosen(options(*only, shard=shard))] == names


@pytest.mark.usefixtures("two_libraries")
def test_a_library_that_is_not_installed_has_a_row_that_says_so() -> None:
    rows = zoo.absent(("TP2",))
    assert [(row["family"], row["TP2"], row["reason"]) for row in rows] == [
        ("absent", "", "not installed: no_such_module")
    ]


def test_the_share_is_of_cells_that_train_plainly() -> None:
    told = [Verdict(kind, kind, "no") for kind in (RIGHT, RIGHT, RIGHT, REFUSED, NOT_PLAIN, WRONG, CRASH)]
    assert [(bar.name, bar.value) for bar in zoo.bars(told)] == [
        ("wrong cells", 1),
        ("cells that crash", 1),
        ("share of right cells", 0.5),
    ]
    assert zoo.reasons(told)[REFUSED] == {"no": 1}


def test_each_part_of_the_page_is_written_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "coverage.md"
    document.write_text("# Families\n\nold\n")
    monkeypatch.setattr(page, "DOCUMENT", document)
    page.write_published("new models\n")
    page.write_families("# Families\n\nnew\n")
    page.write_beyond("by processes\n")
    page.write_published("newer models\n")
    page.write_beyond("compiled\n")
    published = f"{page.PUBLISHED}\n\nnewer models"
    assert document.read_text() == f"# Families\n\nnew\n\n{published}\n\n{page.BEYOND}\n\ncompiled\n"


@pytest.mark.usefixtures("two_libraries")
def test_models_of_the_selection_are_chosen_by_name_plan_and_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beyond, "LIBRARIES", zoo.LIBRARIES)
    monkeypatch.setattr(beyond, "SELECTION", {"there: c": "TP2", "absent: a": "TP2", "there: a": "PP2"})
    assert [family.name for family in beyond.chosen(options("*"))] == ["there: c", "there: a"]
    assert [family.name for family in beyond.chosen(options("*: a"))] == ["there: a"]
    assert [family.name for family in beyond.chosen(options("*", plan=["PP2"]))] == ["there: a"]
    assert [family.name for family in beyond.chosen(options("*", shard="1/2"))] == ["there: c"]


def test_the_selection_has_twenty_models_of_all_libraries_under_plans_of_two_ranks() -> None:
    assert len(beyond.SELECTION) == 20
    assert {name.partition(":")[0] for name in beyond.SELECTION} == set(LIBRARIES)
    for plan in beyond.SELECTION.values():
        assert PLANS[plan](2).devices == (0, 1)


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_family_is_tried_by_processes_as_by_one() -> None:
    family = Family("small", "net", Small, lambda rows, length: {"x": torch.randn(rows, 3)}, micro_batches=1)
    way = Way("processes", try_as_processes, WORLD, SILENCE)
    heard = tried([family], ("DP 3:1", "TP2"), asked(), way)[family.name]
    assert [verdict(family, heard, plan).kind for plan in ("DP 3:1", "TP2")] == [RIGHT, RIGHT]


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_process_that_ends_is_a_crash_of_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAPTURES)  # each rank captures: what the other has kept would spare it its end
    family = Family("ends", "net", Ending, lambda rows, length: {"x": torch.randn(rows, 3)}, micro_batches=1)
    heard = tried([family], ("DP 3:1",), asked(), Way("processes", try_as_processes, WORLD, SILENCE))[family.name]
    assert verdict(family, heard, "DP 3:1").kind == CRASH


@pytest.mark.skipif(torch.version.cuda is not None, reason="with CUDA, torch refuses backward in forks of what ran it")
def test_a_family_is_tried_compiled(tmp_path: Path) -> None:
    family = Family("small", "net", Small, lambda rows, length: {"x": torch.randn(rows, 3)}, micro_batches=1)
    way = Way("compiled", in_lockstep(replace(AS_RANKS, backend="aot_eager")))
    log = tmp_path / "log"
    heard = tried([family], ("DP 3:1",), asked(log), way)[family.name]
    assert verdict(family, heard, "DP 3:1").kind == RIGHT
    assert json.loads(log.read_text())["way"] == "compiled"
    taken_over = tried([family], ("DP 3:1",), asked(log), replace(way, work=refuse))
    assert taken_over[family.name] == heard


def test_what_some_ranks_refuse_is_a_crash() -> None:
    refused, right = {REFUSED: "PlanError: no"}, {"made": b""}
    assert of_ranks([refused, refused]) == refused
    assert of_ranks([right, refused]) == {CRASH: "1 of 2 ranks: PlanError: no"}
    assert of_ranks([refused, {CRASH: "closed"}]) == {CRASH: "closed"}
