"""Breaks files, and sees how they are read: `python -m tests.broken_files --faults 2000 --seed 1`.

Every kind of file that is read (`saved_kinds.py`, `document_kinds.py`) meets every fault (`faults.py` and beside it).
A reader raises an error of ours, with model, optimizer and random numbers untouched bit for bit, or gives the true
values; it neither hangs, nor takes much memory, nor changes what it reads. Prints a line for each finding, a table,
what was found by its place, and as its last line one JSON object; the status is 1 where anything was found.

`--readers --seconds 60` loads a folder in two processes while a third saves it again and again; `--kills 200` kills
what saves it at random moments, and looks at what is there then.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from tests.broken_files.saves import BARS, kill_while_saving, read_while_written
from tests.broken_files.trials import HARM, SECONDS, Sets, Trial, pairs, trial

Group = tuple[str, str, str, str]


def main(given: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0 if nothing is found."""
    options = _options(given)
    if options.readers or options.kills:
        return _save_again_and_again(options)
    with tempfile.TemporaryDirectory() as folder:
        return _break_files(options, Sets(Path(folder)))


def _break_files(options: argparse.Namespace, sets: Sets) -> int:
    started, done = monotonic(), list[Trial]()
    known = pairs(sets, options.only)
    print(f"{len(known)} pairs of a kind and a fault, after {monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    for seed in range(options.seed, options.seed + options.faults):
        kind, fault = Random(seed).choice(known)
        made = trial(sets, kind, fault, seed, seconds=options.bound)
        done.append(made)
        if made.finding is not None or options.faults == 1:
            print(told(made), flush=True)
        if len(done) % 100 == 0:
            print(f"{len(done)} trials in {monotonic() - started:.0f} s: {counted(done)}", file=sys.stderr, flush=True)
    print_table(done)
    print_groups(done)
    found = Counter(made.finding.what for made in done if made.finding)
    bars = [{"name": what, "value": found[what], "bar": 0, "holds": not found[what]} for what in HARM]
    print(json.dumps({"benchmark": "broken_files", "bars": bars, "trials": len(done), "seed": options.seed}))
    return int(bool(found))


def _save_again_and_again(options: argparse.Namespace) -> int:
    counts, told = (
        kill_while_saving(options.kills, options.seed) if options.kills else read_while_written(options.seconds)
    )
    print("\n".join(told))
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    bars = [{"name": what, "value": counts[what], "bar": 0, "holds": not counts[what]} for what in BARS]
    print(json.dumps({"benchmark": "broken_files saves", "bars": bars, **counts}))
    return int(not all(bar["holds"] for bar in bars))


def told(made: Trial) -> str:
    """Return a trial as text."""
    finding = made.finding
    what = made.outcome if finding is None else f"{finding.what.upper()} {finding.place} {finding.says[:200]}"
    return f"{made.kind}/{made.fault} in {made.where[:120]}: {what}   [{made.again}]"


def counted(done: Sequence[Trial]) -> str:
    """Return the outcomes, counted."""
    counts = Counter(made.finding.what if made.finding else made.outcome for made in done)
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


def print_table(done: Sequence[Trial]) -> None:
    """Print trials and findings by kind, and by fault."""
    for title, name in (("kind", "kind"), ("fault", "fault")):
        by_name: dict[str, list[Trial]] = defaultdict(list)
        for made in done:
            by_name[getattr(made, name)].append(made)
        print(f"\n{title:36}{'trials':>8}{'found':>8}")
        for one, trials in sorted(by_name.items()):
            print(f"{one:36}{len(trials):>8}{sum(made.finding is not None for made in trials):>8}   {counted(trials)}")


def print_groups(done: Sequence[Trial]) -> None:
    """Print what was found by kind, place and error, the most harmful first, each with its smallest seed."""
    groups: dict[Group, list[Trial]] = defaultdict(list)
    for made in done:
        if made.finding is not None:
            what, place, says = made.finding.what, made.finding.place, made.finding.says
            groups[what, made.kind, place, says.split(":")[0] if place else ""].append(made)
    for (what, kind, place, error), trials in sorted(
        groups.items(), key=lambda item: (HARM.index(item[0][0]), -len(item[1]), item[0])
    ):
        least = min(trials, key=lambda made: made.seed)
        assert least.finding is not None
        print(f"\n{what}: {kind}: {error} {place} ({len(trials)} of {len(done)})".replace(":  (", " ("))
        print(f"   {least.fault}: {least.where[:160]}\n   {least.finding.says[:240]}\n   {least.again}")


def _options(given: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.broken_files", description=__doc__)
    parser.add_argument("--faults", type=int, default=500, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next have the next (default: 0)")
    parser.add_argument("--only", default="", metavar="KIND/FAULT", help="one kind, /one fault, or both")
    parser.add_argument("--bound", type=float, default=SECONDS, help="seconds to read a set (default: %(default)s)")
    parser.add_argument("--readers", action="store_true", help="load what is saved meanwhile, for --seconds")
    parser.add_argument("--seconds", type=float, default=60.0, help="of --readers (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kill what saves N times")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
