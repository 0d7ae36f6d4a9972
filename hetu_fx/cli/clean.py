"""The command `hetu-fx clean`: which jobs' snapshots are in this node's memory, and whether their jobs still run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from hetu_fx.base.words import bytes_text

IDLE_MINUTES = 10.0


def add_clean(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx clean`."""
    parser.add_argument("--yes", action="store_true", help="remove what is stale (default: only list it)")
    parser.add_argument(
        "--idle",
        type=float,
        default=IDLE_MINUTES,
        metavar="MINUTES",
        help="a job is stale once no process of it lives and nothing was written for this time (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def call_clean(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx clean`."""
    from hetu_fx.checkpoint.snapshot_folders import job_folders

    found = job_folders()
    stale = [one for one in found if not one.is_used and one.idle_seconds >= 60 * options.idle]
    states = {one.path: "removed" if options.yes and one.remove() else "stale" for one in stale}
    rows = [
        {
            "folder": str(one.path),
            "bytes": one.num_bytes,
            "idle_seconds": round(one.idle_seconds),
            "state": states.get(one.path, "in use" if one.is_used else "recent"),
        }
        for one in found
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for one, row in zip(found, rows, strict=True):
        print(f"{row['state']:8} {bytes_text(one.num_bytes):>10} idle {one.idle_seconds / 60:.0f} min  {one.path}")
    if not found:
        print("no job has snapshots in this node's memory")
    elif stale and not options.yes:
        print("hint: hetu-fx clean --yes removes what is stale; its jobs can then resume from checkpoints only")
    return 0
