"""The table that all texts have."""

from __future__ import annotations

from collections.abc import Sequence


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain text table with left-aligned columns, no trailing blanks."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
