"""Broken files are refused or give the true values; what is planted in a reader is found.

`python -m tests.broken_files --faults 2000` tries as many as there is time for.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hetu_fx.errors import CheckpointError
from tests.broken_files import saves
from tests.broken_files.__main__ import main, print_groups, print_table, told
from tests.broken_files.children import in_child
from tests.broken_files.kind import Kind, Promise
from tests.broken_files.saved_kinds import seal
from tests.broken_files.saves import BARS, RENAMES, kill_while_saving, outcome_of, read_while_written
from tests.broken_files.trials import FAULTS, HARM, KINDS, Finding, Sets, Trial, pairs, trial

FAULTS_PER_KIND = 3
SEED = 40
MOST_BYTES = 100_000
PATIENCE = 60.0
"""Nothing is measured here: a reader that hangs does so for ever."""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return Sets(tmp_path_factory.mktemp("sets"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_is_refused_or_gives_the_true_values(sets: Sets, kind: str) -> None:
    chosen = Random(f"{SEED} {kind}").sample(pairs(sets, kind), FAULTS_PER_KIND)
    made = [trial(sets, *pair, seed, seconds=PATIENCE) for seed, pair in enumerate(chosen, SEED)]
    assert [told(one) for one in made if one.finding is not None] == []


def test_sums_that_are_made_right_are_those_that_were_written(sets: Sets) -> None:
    good = sets.of("checkpoint with right sums").folder
    before = {path: path.read_bytes() for path in good.rglob("*") if path.is_file()}
    seal(good)
    assert {path: path.read_bytes() for path in before} == before


def test_every_fault_can_happen_to_some_kind(sets: Sets) -> None:
    assert {fault for kind in KINDS if "export" not in kind for _, fault in pairs(sets, kind)} == FAULTS.keys()


_held: list[int] = [0]
"""What a planted reader may change."""


def write_number(folder: Path, number: int) -> None:
    (folder / "numbers.json").write_text(json.dumps({"number": number + 1, "checked": str(number + 1)}))


def read_number(folder: Path) -> Any:
    path = folder / "numbers.json"
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise CheckpointError("no file of its size")
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read it: {error}") from error
    if not isinstance(found, dict) or str(found.get("number")) != found.get("checked"):
        raise CheckpointError("numbers differ")
    return found["number"]


def believe_number(folder: Path) -> Any:
    return json.loads((folder / "numbers.json").read_bytes())["number"]


def change_at_once(folder: Path) -> Any:
    _held[0] += 1
    return read_number(folder)


def write_too(folder: Path) -> Any:
    (folder / "was_read").touch()
    return read_number(folder)


def sleep_where_it_is_wrong(folder: Path) -> Any:
    try:
        return read_number(folder)
    except CheckpointError:
        time.sleep(10 * PATIENCE)


def take_memory(folder: Path) -> Any:
    bytearray(b"x") * (300 << 20)
    return read_number(folder)


def crash_where_it_is_wrong(folder: Path) -> Any:
    try:
        return read_number(folder)
    except CheckpointError:
        os.kill(os.getpid(), signal.SIGKILL)


def refuse_links(folder: Path) -> Any:
    if (folder / "numbers.json").is_symlink():
        raise CheckpointError("a link")
    return read_number(folder)


NUMBERS = Kind(write_number, read_number, lambda: list(_held))


def planted(folder: Path, read: Callable[[Path], Any], fault: str, seconds: float = PATIENCE) -> Finding | None:
    """Return what is found of a reader of numbers."""
    kinds = {"good": NUMBERS, "planted": Kind(write_number, read, lambda: list(_held))}
    return trial(Sets(folder, kinds), "planted", fault, 1, seconds=seconds).finding


@pytest.mark.parametrize(
    ("what", "read", "fault", "seconds"),
    [
        ("wrong values", believe_number, "document: 2**70", PATIENCE),
        ("changed after an error", change_at_once, "truncated", PATIENCE),
        ("set changed", write_too, "truncated", PATIENCE),
        ("refused", refuse_links, "behind a link", PATIENCE),
        ("hang", sleep_where_it_is_wrong, "truncated", 0.5),
        ("memory", take_memory, "document: key removed", PATIENCE),
        ("ended", crash_where_it_is_wrong, "truncated", PATIENCE),
        ("foreign error", believe_number, "truncated", PATIENCE),
    ],
)
def test_what_is_planted_is_found(
    tmp_path: Path, what: str, read: Callable[[Path], Any], fault: str, seconds: float
) -> None:
    found = planted(tmp_path, read, fault, seconds)
    assert found is not None
    assert found.what == what
    assert what in HARM


def test_nothing_is_found_of_a_reader_that_checks(tmp_path: Path) -> None:
    sets = Sets(tmp_path, {"good": NUMBERS})
    made = [trial(sets, *pair, 1, seconds=PATIENCE) for pair in pairs(sets)]
    assert [told(one) for one in made if one.finding is not None] == []
    assert {one.outcome for one in made} == {"refused", "true values", "other values"}


def test_a_number_that_is_not_finite_is_found_where_people_write_files(tmp_path: Path) -> None:
    kind = Kind(write_number, believe_number, promise=Promise.FINITE)
    sets = Sets(tmp_path, {"written": kind})
    found = [trial(sets, "written", "document: NaN for a number", seed).finding for seed in range(2)]
    assert [one.says for one in found if one is not None] == ["a number is not finite"] * 2


def test_a_trial_is_run_again_by_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--only", "losses/bit flipped", "--faults", "1", "--seed", "7"]
    statuses = [main(words) for _ in range(2)]
    one, other = capsys.readouterr().out.split("benchmark")[:2]
    assert statuses == [0, 0]
    assert re.findall("bit [0-9]+ of [0-9]+", one) == re.findall("bit [0-9]+ of [0-9]+", other) != []


def test_a_report_has_the_most_harmful_first_and_the_smallest_seed_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    foreign = Finding("foreign error", "base/documents.py:read", "KeyError: 'a'")
    made = [Trial("plan", "emptied", seed, "plan.json", "error", foreign) for seed in (9, 4)]
    wrong = Trial("weights", "zeroed", 11, "model.safetensors", "wrong", Finding("wrong values", "", "1 for 2"))
    print_table([*made, wrong])
    print_groups([*made, wrong])
    printed = capsys.readouterr().out
    assert printed.index("wrong values: weights") < printed.index("foreign error: plan: KeyError base/documents.py")
    assert "--only 'plan/emptied' --faults 1 --seed 4" in printed
    assert "--seed 9" not in printed


@pytest.mark.distributed
def test_what_is_read_beside_a_writer_is_of_one_save() -> None:
    counts, said = read_while_written(4.0)
    assert {what: counts[what] for what in BARS} == dict.fromkeys(BARS, 0), said
    assert counts["saves"] > 0


@pytest.mark.distributed
def test_a_save_that_is_killed_leaves_a_whole_one() -> None:
    counts, said = kill_while_saving(RENAMES + 2, seed=1)
    assert {what: counts[what] for what in BARS} == dict.fromkeys(BARS, 0), said


def _mixed() -> None:
    run = saves.trained()
    run.fill(1)
    next(run.model.parameters()).data.fill_(2)
    saves.check_numbers({"number": 1})


def _raise(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (_mixed, "mixed"),
        (_raise(CheckpointError("torn")), "refused"),
        (_raise(ValueError("of json")), "foreign"),
        (_raise(KeyError("files")), "foreign"),
        (lambda: 3, "whole"),
    ],
)
def test_loads_beside_a_writer_are_told_apart(act: Callable[[], Any], kind: str) -> None:
    assert in_child(lambda: outcome_of(act)[0], seconds=PATIENCE).sound == kind
