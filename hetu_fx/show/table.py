"""The table that all texts have."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table_text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a plain text table with left-aligned columns, no trailing blanks."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn with rich on a terminal where it is installed, else in plain columns."""
    if not (sys.stdout.isatty() and _draw_table(header, rows)):
        print(table_text(header, rows))


def _draw_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Draw a table with rich; tell whether that could be done."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
    return True
