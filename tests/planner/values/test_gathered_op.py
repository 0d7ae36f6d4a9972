"""A record of what is gathered checks itself, is written and read, and says where, how much and what would avoid it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.errors import StateError
from hetu_fx.planner.values.gathered_op import GATHERED_OP, HEADER, KINDS, GatheredOp, gathered_text

LOSS = GatheredOp(
    kind="rows",
    op="aten.matmul.default",
    line="loss.py:41",
    rows=64,
    num_bytes=2.5e6,
    path="head",
    source="return (u @ v.t()).exp()",
    seconds=0.002,
    repeated_seconds=0.0005,
    share=0.04,
)
UNKNOWN = GatheredOp("no rule", "mine.op.default", "net.py:7", rows=64, num_bytes=1000.0)


def test_what_is_written_is_read() -> None:
    for one in (LOSS, UNKNOWN):
        assert GATHERED_OP.read(GATHERED_OP.write(one), "a log") == one
    assert GATHERED_OP.write(UNKNOWN) == {
        "kind": "no rule", "op": "mine.op.default", "line": "net.py:7", "rows": 64, "bytes": 1000.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"kind": "row"}, "did you mean 'rows'"),
        ({"num_bytes": -1.0}, "num_bytes -1"),
        ({"seconds": float("nan")}, "seconds nan"),
        ({"share": float("inf")}, "share inf"),
    ],
)
def test_no_other_kind_and_no_wrong_number_is_taken(change: dict[str, object], what: str) -> None:
    with pytest.raises(StateError, match=what):
        replace(LOSS, **change)  # type: ignore[arg-type]


def test_a_warning_says_the_line_the_price_and_the_cure() -> None:
    said, hint = str(LOSS).split("\n")
    assert said.startswith("aten.matmul.default (loss.py:41, in head: return (u @ v.t()).exp()) needs all rows")
    assert said.endswith("2.5 MB in a step of 64 rows, 2 ms, 500 us more of work")
    assert hint == f"hint: {LOSS.cure}"
    assert str(UNKNOWN).split("\n")[0].endswith("1 kB in a step of 64 rows"), "what is not known is not said"


def test_the_table_has_a_row_for_each_and_a_cure_for_each_kind_within_eighty_columns() -> None:
    table, *rest = gathered_text((LOSS, replace(LOSS, line="loss.py:50"), UNKNOWN))
    title, header, *rows = table.splitlines()
    assert "64 rows" in title
    assert header.split("  ")[0] == HEADER[0]
    assert [row.split()[0] for row in rows] == [LOSS.op, LOSS.op, UNKNOWN.op]
    assert max(map(len, table.splitlines())) <= 80
    assert [line for line in rest if line.startswith("hint: ")] == [
        f"hint: {LOSS.op}: {KINDS['rows'].cure}",
        f"hint: {UNKNOWN.op}: {KINDS['no rule'].cure}",
    ]
    assert sum("in head" in line for line in rest) == 2


def test_where_nothing_is_gathered_nothing_is_said() -> None:
    assert list(gathered_text(())) == []
