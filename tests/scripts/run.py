"""Run scripts in settings, each compared with the plain script on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic

from tests.scripts.crew import Crew, crew
from tests.scripts.script import Script
from tests.scripts.settings import Setting
from tests.scripts.verdict import Kind, Outcome, Raised, Verdict, judge


def run_all(chosen: Sequence[Script], settings: Sequence[Setting]) -> Iterator[tuple[Script, Setting, Verdict]]:
    """Yield what comes of each script in each setting that it makes sense in."""
    expected = dict(_plain(chosen))
    for setting in settings:
        with crew(setting.name, setting.world) as ranks:
            for script in chosen:
                if setting.name in script.settings:
                    yield script, setting, verdict_of(script, expected[script.name], ranks, setting.world)


def _plain(chosen: Sequence[Script]) -> Iterator[tuple[str, Outcome]]:
    with crew("", 1) as alone:
        for script in chosen:
            yield script.name, plain_outcome(script, alone)


def plain_outcome(script: Script, alone: Crew) -> Outcome:
    """Return what the plain script does on one device."""
    return alone.run(script).get(0, Raised(False, "the plain script did not end", ""))


def verdict_of(script: Script, expected: Outcome, ranks: Crew, world: int) -> Verdict:
    """Run a script in a setting and judge it."""
    start = monotonic()
    if isinstance(expected, Raised) and not script.refused:
        return Verdict(Kind.CRASH, f"the plain script raised {expected.text} ({expected.where})")
    verdict = judge(script, expected, ranks.run(script), world)
    return replace(verdict, seconds=monotonic() - start)
