"""The page of areas that have a table of their own: each line with the largest difference under each plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tests.scripts.report import Found
from tests.scripts.script import Script
from tests.scripts.settings import SETTINGS
from tests.scripts.verdict import Kind, Verdict

_HEAD = """# Trainers against one device

Each line is a setting of a trainer, in a script as its user would write it. It ran on one process without hetu_fx, and
on two with a parallel model. The comparison covers everything that was logged (losses, gradient norms, rates,
evaluations), file names, and the weights in the last checkpoint. A run that resumed from the first checkpoint is
compared too.

- A number is the largest difference on both ranks, relative to the largest value of its tensor or log.
- "0" is equal bit for bit.
- *refused*: hetu_fx raises an error that says what to do instead.
- "-" was not run.

Models are small and in single precision, except in lines of bf16 and fp16. Lightning's lines, and lines that say so,
are in double precision. Optimizers that divide gradients by their own size (AdamW, RMSprop) turn the rounding of tiny
gradients into a difference of weights. The same lines in double precision show that it is only rounding: their
differences are smaller by the ratio of the precisions.
"""
_NOT_RUN = "-"


def page(found: Found) -> str:
    """Return the tables, one for each area."""
    names = [name for name in SETTINGS if any(name in verdicts for _, verdicts in found.scripts())]
    head = " | ".join(["setting", "compared", *(SETTINGS[name].title for name in names)])
    lines = [_HEAD, f"{_remade(found)}\n"]
    for area in dict.fromkeys(script.area for script, _ in found.scripts()):
        rows = [row for one in found.scripts() if one[0].area == area for row in _rows(*one, names)]
        title = f"## {area.replace('_', ' ').capitalize()}: {len(rows)}"
        usual = _usual(rows)
        told = [f"*all*: {usual}.", ""] if usual else []
        table = [_markdown([one, "*all*" if compared == usual else compared, *cells]) for one, compared, *cells in rows]
        lines += [title, "", *told, f"| {head} |", "|" + "---|" * (len(names) + 2), *table, ""]
    return "\n".join(lines)


def _usual(rows: Sequence[Sequence[str]]) -> str:
    """Return what is compared in most lines, where several compare the same of more than one kind; else ""."""
    ((compared, count),) = Counter(compared for _, compared, *_ in rows).most_common(1)
    return compared if count > 1 and "," in compared else ""


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _remade(found: Found) -> str:
    areas = " ".join(f"--area {area}" for area in dict.fromkeys(script.area for script, _ in found.scripts()))
    return f"`python -m tests.scripts {areas} --page docs/trainer.md` makes this page."


def _rows(script: Script, verdicts: Mapping[str, Verdict], names: list[str]) -> list[list[str]]:
    """Return the cells of a script's lines.

    One is for each setting that the names of its results begin with, else one for all.
    """
    results = list(dict.fromkeys(name for verdict in verdicts.values() for name in verdict.differences))
    lines = list(dict.fromkeys(_line_of(script, result) for result in results)) or [script.name]
    return [_row(line, [r for r in results if _line_of(script, r) == line], verdicts, names) for line in lines]


def _line_of(script: Script, result: str) -> str:
    setting, colon, _ = result.rpartition(": ")
    return setting if colon else script.name.partition(": ")[2]


def _row(line: str, results: list[str], verdicts: Mapping[str, Verdict], names: list[str]) -> list[str]:
    cells = [_cell(verdicts[name], results) if name in verdicts else _NOT_RUN for name in names]
    return [line, _compared(results), *cells]


def _cell(verdict: Verdict, results: list[str]) -> str:
    if verdict.kind is not Kind.RIGHT:
        return verdict.kind.value
    largest = max((verdict.differences[result] for result in results), default=0.0)
    return f"{largest:.1e}" if largest else "0"


def _compared(results: list[str]) -> str:
    """Return what was compared, in short: what is of one kind once."""
    kinds = {"file": "weights of files", "model": "parameters", "resumed": "resumed"}
    names = (result.rpartition(": ")[2] for result in results)
    return ", ".join(dict.fromkeys(kinds.get(name.replace(".", " ").split(" ")[0], name) for name in names))
