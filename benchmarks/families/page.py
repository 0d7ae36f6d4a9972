"""docs/coverage.md: the table of the families, and below it that of published models; each is written by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "coverage.md"
PUBLISHED = "## Models of published libraries"


def write_families(text: str) -> None:
    """Write the first part of the page, and keep what is there of published models."""
    _, heading, published = DOCUMENT.read_text().partition(PUBLISHED)
    DOCUMENT.write_text(f"{text}\n{heading}{published}" if heading else text)


def write_published(text: str) -> None:
    """Write what is told of published models, and keep what is above."""
    families, _, _ = DOCUMENT.read_text().partition(PUBLISHED)
    DOCUMENT.write_text(f"{families.rstrip()}\n\n{PUBLISHED}\n\n{text}")


def markdown(heads: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    """Lay rows out as a table of a page."""
    lines = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
