"""Run everything that scripts do, in every setting, against one device: `python -m tests.scripts`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.scripts import differences
from tests.scripts.record import read, write
from tests.scripts.report import Found, bars, page, summary
from tests.scripts.run import run_all
from tests.scripts.script import Script, has_own_table, scripts, usual
from tests.scripts.settings import SETTINGS
from tests.scripts.verdict import is_expected


def main(given: Sequence[str] | None = None) -> int:
    """Run what is asked for, print a line for each, then the table, and JSON at last; 0 if all came out as they say."""
    options = _options(given)
    chosen = _chosen(options)
    if options.list:
        print("\n".join(f"{one.area}: {one.name}" for one in chosen))
        return 0
    settings = [SETTINGS[name] for name in options.setting or SETTINGS]
    found = Found()
    known = read(options.record)
    for one, setting, verdict in run_all(chosen, settings, known):
        found.add(one, setting.name, verdict)
        if (one.name, setting.name) not in known:
            write(options.record, one, setting.name, verdict)
        good = is_expected(one, verdict)
        if options.verbose or not good:
            why = f": {verdict.why}" if verdict.why else ""
            print(f"{verdict.kind.value:9} {setting.name:5} {one.area}: {one.name} {verdict.seconds:.1f} s{why}")
            sys.stdout.flush()
    print(summary(found))
    if options.page:
        options.page.write_text(_page_of(chosen)(found))
    print(json.dumps({"benchmark": "scripts", "bars": bars(found)}))
    return 0 if all(is_expected(*one) for one in found.each()) else 1


def _page_of(chosen: list[Script]) -> Callable[[Found], str]:
    """Return what makes the page of some scripts."""
    return differences.page if all(map(has_own_table, chosen)) else page


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=__doc__)
    parser.add_argument("--area", action="append", help="only entries of this file; may be repeated")
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help="only this way; may be repeated")
    parser.add_argument("-k", metavar="TEXT", action="append", help="only entries with this in their name; as --area")
    parser.add_argument("--page", type=Path, help="write the table as a page of the docs")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write verdicts there; go on from what it holds")
    parser.add_argument("--list", action="store_true", help="only list the entries")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each, also for what came out right")
    return parser.parse_args(given)


def _chosen(options: argparse.Namespace) -> list[Script]:
    return [
        one
        for one in (scripts().values() if options.area else usual())
        if (not options.area or one.area in options.area)
        and (not options.k or any(text in one.name for text in options.k))
    ]


if __name__ == "__main__":
    sys.exit(main())
