"""The table of what scripts do and what came of it: for the terminal, for the docs, and as bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.scripts.script import Script
from tests.scripts.settings import SETTINGS
from tests.scripts.verdict import Kind, Verdict

_BAD = (Kind.DIFFERENT, Kind.CRASH, Kind.HANG)
_LEAST_SCRIPTS, _LEAST_RIGHT = 150, 130

_HEAD = """# What scripts do to a model

Every line is something that training scripts do. It ran as a plain script on one device, and with a parallel model.
Losses, gradients, parameters and outputs must be equal, in fp64 unless the line is about another precision.

- *right*: they are equal.
- *refused*: hetu_fx raises an error that says what to do instead.
- `-`: the line makes no sense there, such as one rank alone among one.

[Adapt a training script](howto/scripts.md) has the conclusions. `python -m tests.scripts --page docs/scripts.md` makes
this page.
"""


class Found:
    """Verdicts by script and setting, in the order in which they came."""

    def __init__(self) -> None:
        self._by_script: dict[str, tuple[Script, dict[str, Verdict]]] = {}

    def add(self, script: Script, setting: str, verdict: Verdict) -> None:
        """Take one in."""
        self._by_script.setdefault(script.name, (script, {}))[1][setting] = verdict

    def each(self) -> Iterator[tuple[Script, Verdict]]:
        """Yield all verdicts."""
        for script, verdicts in self._by_script.values():
            yield from ((script, verdict) for verdict in verdicts.values())

    def scripts(self) -> Iterator[tuple[Script, dict[str, Verdict]]]:
        """Yield the scripts with their verdicts by setting."""
        yield from self._by_script.values()

    def count(self, kind: Kind) -> int:
        """Return how many scripts are of a kind: of the worst that any setting has made of it."""
        return sum(_worst(verdicts) is kind for _, verdicts in self._by_script.values())


def _worst(verdicts: dict[str, Verdict]) -> Kind:
    order = list(Kind)
    return max((verdict.kind for verdict in verdicts.values()), key=order.index)


def summary(found: Found) -> str:
    """Return how many scripts of each area came out how."""
    areas = list(dict.fromkeys(script.area for script, _ in found.scripts()))
    counts = Counter((script.area, _worst(verdicts)) for script, verdicts in found.scripts())
    lines = [f"{'area':14}" + "".join(f"{kind.value:>11}" for kind in Kind)]
    lines += [f"{area:14}" + "".join(f"{counts[area, kind]:>11}" for kind in Kind) for area in areas]
    lines.append(f"{'all':14}" + "".join(f"{found.count(kind):>11}" for kind in Kind))
    return "\n".join(lines)


def bars(found: Found) -> list[dict[str, Any]]:
    """Return what is measured, beside its bars."""
    total = sum(1 for _ in found.scripts())
    rows = [("scripts", total, _LEAST_SCRIPTS, total >= _LEAST_SCRIPTS)]
    right = found.count(Kind.RIGHT)
    rows.append(("right in every setting", right, _LEAST_RIGHT, right >= _LEAST_RIGHT))
    rows += [(kind.value, found.count(kind), 0, found.count(kind) == 0) for kind in _BAD]
    return [{"name": name, "value": value, "bar": bar, "holds": holds} for name, value, bar, holds in rows]


def page(found: Found) -> str:
    """Return the table as a page of the docs."""
    names = [name for name in SETTINGS if any(name in verdicts for _, verdicts in found.scripts())]
    head = " | ".join(["a script ...", *(SETTINGS[name].title for name in names)])
    lines = [_HEAD, _total(found), ""]
    for area in dict.fromkeys(script.area for script, _ in found.scripts()):
        lines += [f"## {area.capitalize()}", "", f"| {head} |", "|" + "---|" * (len(names) + 1)]
        lines += [_row(script, verdicts, names) for script, verdicts in found.scripts() if script.area == area]
        lines.append("")
    return "\n".join(lines)


def _total(found: Found) -> str:
    """Say what all lines come to, each by the worst that any setting has made of it."""
    counts = ", ".join(f"{found.count(kind)} {kind.value}" for kind in Kind)
    return f"Of {sum(1 for _ in found.scripts())} lines, by the worst of their settings: {counts}."


def _row(script: Script, verdicts: dict[str, Verdict], names: list[str]) -> str:
    cells = [verdicts[name].kind.value if name in verdicts else "-" for name in names]
    return f"| {script.name} | {' | '.join(cells)} |"
