"""docs/coverage.md: the table of the families, that of published models, and that of a selection of these by processes.

Each is written by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "coverage.md"
PUBLISHED = "## Models of published libraries"
BEYOND = "## Published models as processes, and compiled"


def write_families(text: str) -> None:
    """Write the first part of the page, and keep the others."""
    _write("", text)


def write_published(text: str) -> None:
    """Write what is told of published models, and keep the other parts."""
    _write(PUBLISHED, text)


def write_beyond(text: str) -> None:
    """Write what is told of published models by processes and compiled, and keep the other parts."""
    _write(BEYOND, text)


def _write(heading: str, text: str) -> None:
    """Write the part under a heading; the first part has none."""
    families, published, beyond = (found.strip("\n") for found in _parts())
    parts = {"": families, PUBLISHED: published, BEYOND: beyond} | {heading: text.strip("\n")}
    told = (f"{head}\n\n{part}" if head else part for head, part in parts.items() if part)
    DOCUMENT.write_text("\n\n".join(told) + "\n")


def _parts() -> tuple[str, str, str]:
    """Return what the page says in each part, without its heading."""
    above, _, beyond = DOCUMENT.read_text().partition(BEYOND)
    families, _, published = above.partition(PUBLISHED)
    return families, published, beyond


def markdown(heads: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    """Lay rows out as a table of a page."""
    lines = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
