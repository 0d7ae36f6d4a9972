import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu_fx.base.documents import json_text, nearest, read_json, write_atomically
from hetu_fx.errors import PlanError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(VALUES)
def test_text_for_people_is_the_same_json(value: Any) -> None:
    assert json.loads(json_text(value, width=20)) == value


def test_what_fits_on_a_line_stands_on_one() -> None:
    assert json_text({"a": [1, 2], "b": {"c": 3}}, width=14) == '{"a": [1, 2],\n "b": {"c": 3}}'


def test_the_nearest_word_or_all_words_are_named() -> None:
    assert nearest("devics", ["devices", "ratios"]) == " (did you mean 'devices'?)"
    assert nearest("zzz", ["b", "a"]) == " (known: a, b)"


def test_writing_replaces_and_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    path.chmod(0o640)
    write_atomically(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(PlanError, match=r"x\.json is not valid JSON"):
        read_json(tmp_path / "x.json", PlanError)
