"""What trials have found is kept in a small folder; what is wrong with it costs time only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetu_fx.check import kept
from hetu_fx.check.kept import Answer, KeptAnswers, default_folder, question_key


def test_an_answer_is_read_by_another_process(tmp_path: Path) -> None:
    answer = Answer(question_key(["graph", "plan"]), True, "checked")
    KeptAnswers(tmp_path).put(answer)
    assert KeptAnswers(tmp_path).get(answer.key) == answer
    assert KeptAnswers(tmp_path).get(question_key(["graph", "another plan"])) is None


def test_a_broken_file_is_told_and_asked_anew(tmp_path: Path) -> None:
    (tmp_path / f"{question_key(['x'])}.json").write_text("{")
    with pytest.warns(UserWarning, match="trying the plan again: .* is not valid JSON"):
        assert KeptAnswers(tmp_path).get(question_key(["x"])) is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers = KeptAnswers(tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match="is not kept for the next time"):
        answers.put(Answer("a", True, "checked"))
    assert answers.get("a") is not None  # in this process


def test_the_oldest_answers_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_FILES", 2)
    answers = KeptAnswers(tmp_path)
    for age, key in enumerate(["a", "b", "c"]):
        answers.put(Answer(key, True, "checked"))
        os.utime(tmp_path / f"{key}.json", (age, age))
    answers.put(Answer("d", True, "checked"))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["c", "d"]


def test_answers_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_folder() == Path("/somewhere/hetu_fx/checks")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache/hetu_fx/checks"
