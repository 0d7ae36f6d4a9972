"""What each measure may come to in each folder and in all: numbers in budget.toml, which only fall.

A number that has been raised stands there with the least that it was, and why: `"hetu_fx/base" = [14, 12, "why"]`.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.house.measures import MEASURES
from tests.house.tree import Tree, at
from tests.test_layers import ROOT

FILE = Path(__file__).parent / "budget.toml"
HEAD = """# What the product may come to, by measure and folder: `python -m tests.house --write` writes it.
# Numbers only fall. One that must rise: `--write --because "why"`, which notes [number, the least that it was, why].
"""
MOST_NAMES = 12


class Limit(NamedTuple):
    """What a measure may come to in a folder.

    Attributes:
        number: what it may come to.
        least: the least that it has been.
        why: the reason for which it was raised from that; "" where it was not.
    """

    number: int
    least: int
    why: str = ""


Limits = Mapping[str, Mapping[str, Limit]]
Counts = Mapping[str, Mapping[str, int]]


def counts(tree: Tree) -> Counts:
    """Return what each measure comes to, in all and in each folder."""
    return {name: measure.by_folder(measure.find(tree)) for name, measure in MEASURES.items()}


def read(text: str) -> Limits:
    """Return the limits that a text has.

    Raises:
        ValueError: a number has been raised without a reason.
    """
    found = {name: {row: _limit_of(value) for row, value in rows.items()} for name, rows in tomllib.loads(text).items()}
    for measure, rows in found.items():
        for row, limit in rows.items():
            if (limit.number > limit.least) != bool(limit.why):
                raise ValueError(f"{measure}, {row}: only a number above the least has a reason, and must: {limit}")
    return found


def _limit_of(value: Any) -> Limit:
    return Limit(*value) if isinstance(value, list) else Limit(value, value)


def moved(found: Counts, limits: Limits, why: str = "") -> Limits:
    """Return limits that are what was found; reasons stay where a number is still above the least that it was.

    Raises:
        ValueError: a number rises, and `why` is "".
    """
    made = {
        measure: {row: _moved(count, limits[measure].get(row, Limit(0, 0)), why) for row, count in rows.items()}
        if measure in limits
        else {row: Limit(count, count) for row, count in rows.items()}
        for measure, rows in found.items()
    }
    risen = [f"{measure}, {row}: {made[measure][row].number}" for measure, row, _ in above(found, limits)]
    if risen and not why:
        raise ValueError("\n".join(("these rise: say why with --because, or make them fall", *risen)))
    return made


def _moved(count: int, known: Limit, why: str) -> Limit:
    if count <= known.least:
        return Limit(count, count)
    return Limit(count, known.least, why if count > known.number else known.why)


def written(limits: Limits) -> str:
    """Return limits as the text that `read` reads."""
    parts = [HEAD]
    for measure, rows in limits.items():
        lines = (
            f"{json.dumps(row)} = {json.dumps(list(limit) if limit.why else limit.number)}"
            for row, limit in rows.items()
        )
        parts.append("\n".join((f"[{json.dumps(measure)}]", *lines, "")))
    return "\n".join(parts)


def above(found: Counts, limits: Limits) -> list[tuple[str, str, Limit]]:
    """Return (measure, row, limit) of all counts that are above; a folder without a row may have nothing."""
    return [
        (measure, row, limit)
        for measure, rows in found.items()
        if measure in limits
        for row, count in rows.items()
        if count > (limit := limits[measure].get(row, Limit(0, 0))).number
    ]


def below(found: Counts, limits: Limits) -> list[tuple[str, str, Limit]]:
    """Return (measure, row, limit) of all limits that are more than what there is."""
    return [
        (measure, row, limit)
        for measure, rows in limits.items()
        for row, limit in rows.items()
        if found.get(measure, {}).get(row, 0) < limit.number
    ]


def new_names(tree: Tree, before: Tree, measure: str, row: str) -> list[str]:
    """List what a measure counts in a folder (or in all) that it did not count before, with by how much, if not 1."""
    was, now = (_amounts(one, measure, row) for one in (before, tree))
    return [name if more == 1 else f"{name} (+{more})" for name, more in (now - was).most_common()]


def _amounts(tree: Tree, measure: str, row: str) -> Counter[str]:
    amounts: Counter[str] = Counter()
    for folder, name, amount in MEASURES[measure].find(tree):
        if row in (folder, "in all"):
            amounts[name] += amount
    return amounts


def since() -> Tree:
    """Return the tree at the commit that last wrote the budget; nothing where git does not know."""
    command = ["git", "log", "-1", "--format=%H", "--", str(FILE.relative_to(ROOT))]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()
        return at(commit) if commit else ()
    except (OSError, subprocess.CalledProcessError):
        return ()


def complaints(tree: Tree, limits: Limits) -> list[str]:
    """Return a line for each number that is not its limit: with what is new above it, with what to write below."""
    found = counts(tree)
    risen, fallen = above(found, limits), below(found, limits)
    before = since() if risen else ()
    told = []
    for measure, row, limit in risen:
        new = new_names(tree, before, measure, row)
        more = f", and {len(new) - MOST_NAMES} more" if len(new) > MOST_NAMES else ""
        count = found[measure][row]
        told.append(f"{measure}, {row}: {count}, may be {limit.number}; new: {', '.join(new[:MOST_NAMES])}{more}")
    for measure, row, limit in fallen:
        told.append(f"{measure}, {row}: {found[measure].get(row, 0)} is less than {limit.number}: write it down")
    return [*told, "python -m tests.house --write [--because WHY] writes the numbers"] if told else []
