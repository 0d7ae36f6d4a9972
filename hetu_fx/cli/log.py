"""`hetu-fx log`: what the log of a run says."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def add_log(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx log`."""
    parser.add_argument("file", type=Path, help="what model.hetu.log wrote")
    parser.add_argument("--out", type=Path, metavar="PNG", help="draw the run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def call_log(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx log`."""
    from hetu_fx.report.summary import draw, read_log, summary_text, to_json

    log = read_log(options.file)
    print(json.dumps(to_json(log), indent=2) if options.json else summary_text(log))
    if options.out is not None:
        draw(log, options.out)
    return 0
