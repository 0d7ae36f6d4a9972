"""`hetu-fx launch`: a script in several processes that survive each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hetu_fx.launch.spec import LaunchSpec


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx launch`."""
    parser.usage = "hetu-fx launch --nproc N [options] -- SCRIPT [ARGUMENTS]"
    parser.add_argument("--nproc", type=int, required=True, metavar="N", help="processes on this machine")
    parser.add_argument("--min-nproc", type=int, metavar="M", help="go on with as few when some are lost (default: N)")
    parser.add_argument("--max-losses", type=int, default=100, metavar="L", help="give up after as many")
    for name, default, what in (
        ("--stopped-after", 10.0, "end one that gives no sign of life"),
        ("--stuck-after", 600.0, "end who is missing in a communication"),
        ("--grace", 30.0, "for the others to leave their groups"),
    ):
        parser.add_argument(name, type=float, default=default, metavar="SECONDS", help=f"{what} (default: {default:g})")
    rejoin = "start a lost one again so much later; it joins at a step's end (default: only where too few are left)"
    parser.add_argument("--rejoin-after", type=float, metavar="SECONDS", help=rejoin)
    parser.add_argument("--events", type=Path, metavar="FILE", help="write what happens, a line of JSON each")


def call_launch(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx launch`; the status is the script's."""
    from hetu_fx.launch.worker import run

    spec = LaunchSpec(
        command=tuple(rest),
        nproc=options.nproc,
        min_nproc=options.nproc if options.min_nproc is None else options.min_nproc,
        max_losses=options.max_losses,
        stopped_seconds=options.stopped_after,
        stuck_seconds=options.stuck_after,
        grace_seconds=options.grace,
        rejoin_seconds=options.rejoin_after,
        events=options.events,
    )
    return run(spec)
