"""Models of published libraries: ten of them are as on one device; and what the benchmark makes of what it finds.

They come by the extra `zoo`, which tests do not need: what is not installed is skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.families import page
from benchmarks.families.cells import LIMITS, Subject
from benchmarks.families.family import Family
from benchmarks.families.trials import CRASH, NOT_PLAIN, REFUSED, RIGHT, WRONG, Verdict
from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo.libraries import LIBRARIES, Library

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


def options(*only: str, shard: str = "1/1") -> argparse.Namespace:
    return argparse.Namespace(only=list(only), quick=False, shard=shard)


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
    page.write_published("newer models\n")
    assert document.read_text() == f"# Families\n\nnew\n\n{page.PUBLISHED}\n\nnewer models\n"
