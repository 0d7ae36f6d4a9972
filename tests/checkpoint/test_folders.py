"""Folders that are replaced: nothing of the user's goes, two writers do not meet, nothing half-made stays."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hetu_fx.checkpoint import folders
from hetu_fx.checkpoint.folders import LeftOver, find_folder, latest, replaced_folder
from hetu_fx.checkpoint.manifest import MANIFEST
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CheckpointError, ExportError, HetuFxError, OtherRankError

ALONE = GroupTable.dry(0, 1)


def write(folder: Path, content: str = "x", error: type[HetuFxError] = CheckpointError) -> None:
    with replaced_folder(folder, ALONE, error) as staging:
        (staging / "inner").mkdir()
        (staging / "inner" / "file").write_text(content)


def content(folder: Path) -> str:
    return (folder / "inner" / "file").read_text()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def _a_project(folder: Path) -> None:
    (folder / ".git").mkdir(parents=True)
    (folder / "train.py").write_text("import torch")


def _checkpoints_of_steps(folder: Path) -> None:
    for step in (1, 2):
        write(folder / f"step-{step}")


def _one_with_a_file_of_the_users(folder: Path) -> None:
    write(folder)
    (folder / "inner" / "notes.txt").write_text("do not lose")


def _one_with_a_folder_of_the_users(folder: Path) -> None:
    write(folder)
    (folder / "logs").mkdir()


def _one_with_a_link(folder: Path) -> None:
    write(folder)
    (folder / "data").symlink_to(folder.parent)


def _a_torn_one(folder: Path) -> None:
    write(folder)
    (folder / "inner" / "file").write_text("longer")


def _one_of_a_foreign_manifest(folder: Path) -> None:
    folder.mkdir()
    (folder / MANIFEST).write_text('{"format": "other/1", "files": {}}')


def _a_file(path: Path) -> None:
    path.write_text("weights of last year")


@pytest.mark.parametrize(
    "make",
    [
        _a_project,
        _checkpoints_of_steps,
        _one_with_a_file_of_the_users,
        _one_with_a_folder_of_the_users,
        _one_with_a_link,
        _a_torn_one,
        _one_of_a_foreign_manifest,
        _a_file,
    ],
)
def test_what_is_no_complete_folder_of_ours_is_never_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    place = tmp_path / "there"
    make(place)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"there is there, and would be replaced as a whole, but .*\nhint: give"):
        write(place)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_and_a_complete_one_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    write(tmp_path / "there", "first")
    write(tmp_path / "there", "second")
    assert content(tmp_path / "there") == "second"
    assert names(tmp_path) == ["there"]


@pytest.mark.parametrize("is_there", [True, False])
def test_of_a_link_what_it_leads_to_is_written(tmp_path: Path, is_there: bool) -> None:
    target, link = tmp_path / "disk" / "run", tmp_path / "run"
    target.parent.mkdir()
    if is_there:
        write(target, "first")
    link.symlink_to(target)
    write(link, "second")
    assert link.is_symlink()
    assert content(target) == "second"
    assert names(tmp_path) == ["disk", "run"]


def test_who_writes_what_another_writes_is_told_by_whom(tmp_path: Path) -> None:
    with replaced_folder(tmp_path / "out", ALONE) as staging:
        (staging / "file").write_text("of the first")
        with pytest.raises(CheckpointError, match=rf"out is being written by process {os.getpid()} of .* since 20"):
            write(tmp_path / "out", "of the second")
    assert (tmp_path / "out" / "file").read_text() == "of the first"
    write(tmp_path / "out", "later")
    assert names(tmp_path) == ["out"]


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("step", ["seal", "sync", "os.rename"])
def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    write(tmp_path / "out", "before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"hetu_fx.checkpoint.folders.{step}", full)
        with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device; is the disk full"):
            write(tmp_path / "out", "after")
    assert content(tmp_path / "out") == "before"
    assert names(tmp_path) == ["out"]


def test_where_the_new_one_cannot_take_its_place_the_old_one_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", "before")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if ".new-" in source.name:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(CheckpointError, match="Input/output error"):
            write(tmp_path / "out", "after")
    assert content(tmp_path / "out") == "before"
    assert names(tmp_path) == ["out"]


def test_what_one_rank_cannot_write_is_refused_alike_on_all(tmp_path: Path) -> None:
    def replace_where(error: Exception) -> None:
        with replaced_folder(tmp_path / "out", ALONE):
            raise error

    for error in (OSError("No space left"), OtherRankError("another rank failed: rank 0: No space left")):
        with pytest.raises(CheckpointError, match=r"cannot write .*/out: .*No space left; is the disk full"):
            replace_where(error)
    assert names(tmp_path) == []


def test_an_error_is_of_the_kind_that_is_asked_for(tmp_path: Path) -> None:
    _a_project(tmp_path / "there")
    with pytest.raises(ExportError, match="no complete folder"):
        write(tmp_path / "there", error=ExportError)


def _after_the_first_rename(folder: Path) -> None:
    """Leave what a crash between the two renames does: both are whole, none has its name."""
    for which in ("new", "old"):
        write(folder.with_name("aside"), which)
        folder.with_name("aside").rename(folder.parent / f".{folder.name}.{which}-01234567")


@pytest.mark.parametrize("name", ["step-7", "run[1]-7", "a*?7"])
def test_what_a_crash_between_two_renames_left_is_found_and_put_back(tmp_path: Path, name: str) -> None:
    write(tmp_path / "step-3")
    _after_the_first_rename(tmp_path / name)
    assert latest(tmp_path) == tmp_path / name
    assert content(find_folder(tmp_path / name)) == "new"
    assert names(tmp_path) == sorted([f".{name}.new-01234567", f".{name}.old-01234567", "step-3"])  # only looked at
    write(tmp_path / name, "next")
    assert names(tmp_path) == sorted([name, "step-3"])


@pytest.mark.parametrize("other", ["step-3", None])
def test_what_is_replaced_while_it_is_looked_for_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    write(tmp_path / "step-7", "old")
    if other:
        write(tmp_path / other)
    write(tmp_path / ".step-7.new-01234567", "new")
    looked, renamed = folders.left_overs, list[Path]()

    def renaming(parent: Path) -> list[LeftOver]:
        found = [
            left for left in looked(parent) if renamed or not left.is_new
        ]  # it was not sealed when it was looked at
        if not renamed:
            renamed.append((tmp_path / "step-7").rename(tmp_path / ".step-7.old-01234567"))
        return found

    monkeypatch.setattr(folders, "left_overs", renaming)
    assert latest(tmp_path) == tmp_path / "step-7"


def test_what_was_not_sealed_before_a_crash_does_not_count(tmp_path: Path) -> None:
    write(tmp_path / "step-3")
    write(tmp_path / "step-7", "old")
    (tmp_path / "step-7").rename(tmp_path / ".step-7.old-01234567")
    (tmp_path / ".step-7.new-01234567").mkdir()
    assert content(find_folder(tmp_path / "step-7")) == "old"
    assert latest(tmp_path) == tmp_path / "step-7"


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    write(tmp_path / "run1", "of another run")
    (tmp_path / ".run1.new-01234567").mkdir()  # another run is writing
    write(tmp_path / "run[1]")
    assert names(tmp_path) == [".run1.new-01234567", "run1", "run[1]"]


def test_a_place_that_cannot_be_looked_into_is_no_empty_one(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot read .*file: Not a directory"):
        latest(tmp_path / "file")


def _a_pipe(place: Path) -> None:
    place.mkdir()
    os.mkfifo(place / MANIFEST)


def _an_endless_manifest(place: Path) -> None:
    place.mkdir()
    (place / MANIFEST).write_text("[" * 100_000)


def _a_link_to_itself(place: Path) -> None:
    place.symlink_to(place)


def _a_number_as_manifest(place: Path) -> None:
    place.mkdir()
    (place / MANIFEST).write_text("1e999")


def _files_that_lead_out(place: Path) -> None:
    place.mkdir()
    (place / MANIFEST).write_text('{"format": "hetu_fx.folder/2", "files": {"../x": {"bytes": 0, "xxh3": "0"}}}')


@pytest.mark.parametrize(
    "make", [_a_pipe, _an_endless_manifest, _a_link_to_itself, _a_number_as_manifest, _files_that_lead_out]
)
def test_no_bad_sibling_hides_a_good_folder(tmp_path: Path, make: Callable[[Path], None]) -> None:
    write(tmp_path / "step-3")
    make(tmp_path / "step-9")
    assert latest(tmp_path) == tmp_path / "step-3"
