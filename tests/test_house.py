"""The tree stays readable: folders that one can open, and no public function that nobody else names."""

from __future__ import annotations

from tests.house import files_per_folder, named_by_nobody

MOST_FILES = 24


def test_no_folder_is_too_full_to_open() -> None:
    assert {folder: count for folder, count in files_per_folder().items() if count > MOST_FILES} == {}


def test_public_functions_are_named_by_others() -> None:
    assert named_by_nobody() == []
