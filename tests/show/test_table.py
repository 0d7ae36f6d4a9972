from __future__ import annotations

from hetu_fx.show.table import table_text


def test_tables_align_columns() -> None:
    assert table_text(["a", "long"], [["1", "2"], ["333", ""]]) == "a    long\n1    2\n333"
