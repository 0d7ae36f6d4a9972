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

Each distinct op (op, sizes, other arguments) of tiny models of these families runs forward and backward, one at a time,
with the values of a batch. It runs in float32, in bf16, and in float32 compiled by inductor.

- `within`: ops whose results and gradients are within [tolerance](howto/align.md#tolerances) of float64
- `loss`: the relative error of the whole model's loss
- `drifts first`: the op, with its module, from which a whole forward and backward exceeds the tolerance of its ops

{compiled} families run compiled so far, half a minute each.

{table}

Ops that exceed their tolerance, and why:

{why}

A whole run may drift first at an op that is within tolerance. Then rounding has moved a value across a decision
boundary. t5 puts distances into buckets by the integer part of a logarithm, and mixtures choose experts by scores.

## Planted faults

One op of a family is made wrong: 1 % in its result or its gradient, a transposed dim, or a dtype. {found} of
{faults} are found and named, by the op alone and as the first op of the whole.

## Losses

A tiny language model trains for 300 steps in each kind. Losses agree at a mean relative error below {limit:.1%}:

{losses}
"""


def document(rows: Sequence[Row]) -> str:
    """Lay the rows out as a page."""
    faults, losses = [row for row in rows if "found" in row], [row for row in rows if "alike" in row]
    told = [f"{row['of']}: {row['mean relative error']:.2%}, {'agree' if row['alike'] else 'differ'}" for row in losses]
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
