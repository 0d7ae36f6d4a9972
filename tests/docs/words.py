"""What pages and messages may still have of what they should not: numbers that only fall, in words.toml."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs.banned import found
from tests.docs.messages import ROOT, files, messages
from tests.docs.prose import mean_words

BUDGET = Path(__file__).with_name("words.toml")
MOST_WORDS = 16
"""Of a sentence, in the mean of a page that has no number of its own."""
OWN_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
_VERBS = "ask|call|choose|compare|cut|export|give|leave|let|load|make|name|pass|run|save|set|start|train|use|write"
_INLINE = re.compile(rf"; (?:hint: )?(?:{_VERBS})\b")
_HEAD = "# Written by HETU_FX_WRITE_DOCS=1 pytest tests/docs/test_words.py, which lowers numbers and raises none.\n"

Numbers = Mapping[str, float]


def pages() -> dict[str, str]:
    """Return the text of every page, by its path."""
    paths = [*(ROOT / "docs").rglob("*.md"), *map(ROOT.joinpath, OWN_PAGES)]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}


def mean_words_above_the_limit() -> Numbers:
    """Return the mean words of a sentence of pages that are above the limit."""
    means = {name: round(mean_words(text), 1) for name, text in pages().items()}
    return {name: mean for name, mean in means.items() if mean > MOST_WORDS}


def banned_in_pages() -> Numbers:
    """Return how many banned phrases each page has."""
    return _counted({name: len(found(text)) for name, text in pages().items()})


def banned_in_messages() -> Numbers:
    """Return how many banned phrases the messages of each folder have."""
    return _by_folder(lambda text: len(found(text)))


def inline_hints() -> Numbers:
    """Return how many messages of each folder say what to do within a line, rather than as a hint on its own."""
    return _by_folder(lambda text: len(_INLINE.findall(text)))


def _by_folder(count: Callable[[str], int]) -> Numbers:
    counts: Counter[str] = Counter()
    for path in files():
        folder = "/".join(path.relative_to(ROOT).parts[:-1][:2])
        counts[folder] += sum(count(text) for _, text in messages(path.read_text()))
    return _counted(counts)


def _counted(numbers: Numbers) -> Numbers:
    return {name: number for name, number in sorted(numbers.items()) if number}


MEASURES = {
    measure.__name__: measure
    for measure in (mean_words_above_the_limit, banned_in_pages, banned_in_messages, inline_hints)
}


def budget() -> dict[str, dict[str, float]]:
    """Return the numbers of the file, by measure."""
    return tomllib.loads(BUDGET.read_text()) if BUDGET.is_file() else {}


def lower() -> None:
    """Write the numbers that have fallen; without a file all of them."""
    known = budget()
    now = {name: measure() for name, measure in MEASURES.items()}
    kept = {name: _lowered(known.get(name, {}) if known else numbers, numbers) for name, numbers in now.items()}
    tables = (f"[{name}]\n" + "".join(f'"{key}" = {number}\n' for key, number in kept[name].items()) for name in kept)
    BUDGET.write_text(_HEAD + "\n" + "\n".join(tables))


def _lowered(known: Numbers, now: Numbers) -> Numbers:
    return _counted({name: min(number, now[name]) for name, number in known.items() if name in now})
