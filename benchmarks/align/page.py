"""The page that `python -m benchmarks.align --write-docs` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.align.subjects import EXPLAINED
from hetu_fx_align.losses import LIMIT

Row = Mapping[str, Any]
HEADS = ("ops", "calls", "within", "explained", "unexplained", "loss", "drifts first")
TEXT = """# How exact ops are

Written by `python -m benchmarks.align --write-docs` with torch {torch} on a CPU.

The ops of tiny models of these families, distinct by op, sizes and other arguments, each run forward and backward with
the values of a batch: in float32, in bf16, and in float32 compiled by inductor, one op at a time. An op is within what
is allowed if its results and gradients are, beside the same in float64 ([what is allowed](howto/align.md)). `loss` is
the relative error of the loss of the whole model, `drifts first` the op, and the module around it, from which on a
whole forward and backward is farther off than its ops allow. {compiled} families are run compiled so far, which takes
half a minute each.

{table}

Ops that are farther off, and why:

{why}

Where a whole run drifts first at an op that is within what is allowed by itself, a decision has fallen otherwise: the
distances of t5 are put in buckets by the whole part of a logarithm, and the experts of a mixture are chosen by scores,
which rounding moves across a boundary.

## Planted faults

One op of a family is made wrong: by 1 % in its result or its gradient, by a transposed dim, by a dtype. {found} of
{faults} are found and named, by the op alone and as the first of the whole.

## Losses

A tiny language model is trained for 300 steps in each kind. Alike is a mean relative error below {limit:.1%}:

{losses}
"""


def document(rows: Sequence[Row]) -> str:
    """Lay the rows out as a page."""
    faults, losses = [row for row in rows if "found" in row], [row for row in rows if "alike" in row]
    told = [f"{row['of']}: {row['mean relative error']:.2%}, {'' if row['alike'] else 'not '}alike" for row in losses]
    return TEXT.format(
        torch=torch.__version__.partition("+")[0],
        compiled=sum(row.get("way") == "inductor" for row in rows),
        table=_table([row for row in rows if "within" in row]),
        why="\n".join(f"- {op} in {way}: {why}." for (way, op), why in EXPLAINED.items()),
        found=sum(row["found"] for row in faults),
        faults=len(faults),
        limit=LIMIT,
        losses="\n".join(f"- {line}" for line in told),
    )


def _table(rows: Sequence[Row]) -> str:
    lines = [("family", "way", *HEADS), ("---",) * (len(HEADS) + 2)]
    lines += [(_family(row), row["way"], *(_cell(row[head]) for head in HEADS)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _family(row: Row) -> str:
    """Return the family that a row is of: `bf16: net: unet, bf16` is of net: unet."""
    return str(row["of"]).partition(": ")[2].partition(",")[0]


def _cell(value: object) -> str:
    return f"{value:.0e}" if isinstance(value, float) else str(value)
