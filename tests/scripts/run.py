"""Run scripts in settings, each compared with the plain script on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic

from tests.scripts.crew import Crew, crew
from tests.scripts.record import Key
from tests.scripts.script import Script
from tests.scripts.settings import Setting
from tests.scripts.verdict import Kind, Outcome, Raised, Verdict, judge


def run_all(
    chosen: Sequence[Script], settings: Sequence[Setting], known: Mapping[Key, Verdict]
) -> Iterator[tuple[Script, Setting, Verdict]]:
    """Yield what comes of each script in each setting that it makes sense in; what is known is not run again."""
    keys = {one.name: {(one.name, s.name) for s in settings if s.name in one.settings} for one in chosen}
    expected = _plain([one for one in chosen if not keys[one.name] <= known.keys()])
    for setting in settings:
        with crew(setting.name, setting.world) as ranks:
            for one in chosen:
                if (key := (one.name, setting.name)) in keys[one.name]:
                    new = None if key in known else verdict_of(one, expected[one.name], ranks, setting.world)
                    yield one, setting, new or known[key]


def _plain(chosen: Sequence[Script]) -> dict[str, Outcome]:
    with crew("", 1) as alone:
        return {one.name: plain_outcome(one, alone) for one in chosen}


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
