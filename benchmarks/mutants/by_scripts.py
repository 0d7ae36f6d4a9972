"""Whether what scripts do to a model notices mistakes in the guards: scripts on one process, in forks that have one.

This process imports all that scripts need, once. Each mistake names the scripts that are tried first; where none of
them comes out otherwise than without it, all others of some areas are tried.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks.kit.forks import Tell, in_forks
from benchmarks.kit.report import Row
from benchmarks.mutants.live import break_functions
from benchmarks.mutants.mutant import Mutant
from tests.scripts import imports  # noqa: F401  (what scripts import, before there are forks)
from tests.scripts.script import Script, scripts
from tests.scripts.verdict import Kind, Outcome, Raised, Verdict, is_expected, judge
from tests.scripts.worker import outcome_alone

AREAS = ("guards", "later", "forwards")
SETTING = "one"
SECONDS = 120.0
"""For one script; the machine may have other work."""

Tried = Mapping[Mutant, Sequence[str]]


@dataclass(frozen=True)
class Noticed:
    """A script that came out otherwise than without the mistake: which, as what, and why."""

    script: str
    kind: str
    why: str


def judge_all(mutants: Sequence[Mutant]) -> list[Row]:
    """Give a row for each mistake: which script notices it. ValueError for a script that fails without any."""
    runs, start = Runs(scripts()), perf_counter()
    named = dict.fromkeys(name for mutant in mutants for name in mutant.scripts)
    if wrong := runs.look_at(named):
        raise ValueError(f"scripts do not come out as they should, without any mistake: {wrong}")
    _say(f"{len(named)} scripts came out as they should without a mistake in {perf_counter() - start:.0f} s")
    found: dict[Mutant, Noticed | None] = {}
    for mutant, noticed in runs.tried({mutant: mutant.scripts for mutant in mutants}):
        found[mutant] = noticed
        _say(f"{len(found)}/{len(mutants)} {mutant.name}: {_told(noticed)}")
    left = [mutant for mutant, noticed in found.items() if noticed is None]
    runs.look_at(runs.others if left else ())
    for mutant, noticed in runs.tried(dict.fromkeys(left, tuple(runs.known))):
        found[mutant] = noticed
        _say(f"{mutant.name}, by all scripts: {_told(noticed)}")
    return [_row(mutant, found[mutant]) for mutant in mutants]


@dataclass(frozen=True)
class Runs:
    """Runs of scripts.

    Attributes:
        scripts: by name.
        known: what the plain script did on one device, and what the parallel one is without a mistake, by name; of
            those that come out as they should.
    """

    scripts: Mapping[str, Script]
    known: dict[str, tuple[Outcome, Kind]] = field(default_factory=dict)

    @property
    def others(self) -> list[str]:
        """Give the names of the scripts of some areas that are not known."""
        every = (one for one in self.scripts.values() if one.area in AREAS and SETTING in one.settings)
        return [one.name for one in every if one.name not in self.known]

    def look_at(self, names: Iterable[str]) -> dict[str, list[object]]:
        """Run scripts without a mistake, and know them. Give those that do not come out as they should."""
        wrong = {}
        for name, heard in in_forks(names, self._look_at, _at_once(), SECONDS):
            plain, verdict = heard if len(heard) == 2 else (None, None)
            if plain is None or verdict is None or not is_expected(self.scripts[name], verdict):
                wrong[name] = heard
            else:
                self.known[name] = plain, verdict.kind
        return wrong

    def tried(self, names: Tried) -> Iterator[tuple[Mutant, Noticed | None]]:
        """Yield mistakes as they have been tried, each with the first of some scripts that notices it."""
        for mutant, heard in in_forks(names, partial(self._try, names), _at_once(), SECONDS):
            last = heard[-1]
            yield mutant, Noticed(last, "HANG", "said nothing, or died") if isinstance(last, str) else last

    def _look_at(self, name: str, tell: Tell) -> None:
        plain = _outcome(self.scripts[name], "")
        tell(plain)
        tell(_verdict(self.scripts[name], plain))

    def _try(self, names: Tried, mutant: Mutant, tell: Tell) -> None:
        break_functions(mutant)
        for name in names[mutant]:
            tell(name)
            plain, kind = self.known[name]
            verdict = _verdict(self.scripts[name], plain)
            if verdict.kind is not kind:
                tell(Noticed(name, verdict.kind.value, verdict.why[:80]))
                return
        tell(None)


def _verdict(script: Script, plain: Outcome) -> Verdict:
    """Run a script in parallel and judge it."""
    if isinstance(plain, Raised) and not script.refused:
        return Verdict(Kind.CRASH, f"the plain script raised {plain.text}")
    return judge(script, plain, {0: _outcome(script, SETTING)}, 1)


def _outcome(script: Script, setting: str) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return outcome_alone(script, setting, Path(folder))


def _row(mutant: Mutant, noticed: Noticed | None) -> Row:
    row = {"mutant": mutant.name, "file": mutant.path, "caught": "NO", "by": "", "as": "", "why": ""}
    if noticed is not None:
        row |= {"caught": "yes", "by": noticed.script, "as": noticed.kind, "why": noticed.why}
    return row


def _told(noticed: Noticed | None) -> str:
    return "not noticed" if noticed is None else f"{noticed.kind} in {noticed.script!r}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _at_once() -> int:
    return len(os.sched_getaffinity(0))
