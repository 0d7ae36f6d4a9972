"""`python -m benchmarks.preparation`: how long until a model is parallel, and what a small one takes at first."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.kit.report import finish, parser

PARTS = "small", "large"  # the latter keeps this process to one core


def main() -> int:
    """Run the parts and judge them; or be a process of one, which imports what its script needs and no more."""
    made = parser("preparation", "How long it takes until a model is parallel.")
    made.add_argument("--part", choices=PARTS, help="only this one")
    made.add_argument("--worker", type=Path, help="be a process of the small one, and write what was found there")
    made.add_argument("--who", default="", help="what the process is to train by")
    options = made.parse_args()
    if options.worker is not None:
        found = import_module("benchmarks.preparation.script").train(options.who)
        if os.environ["RANK"] == "0":
            import_module("benchmarks.kit.fleet").write_result(options.worker, found)
        return 0
    bars, rows = [], []
    for part in (options.part,) if options.part else PARTS:
        of_part = import_module(f"benchmarks.preparation.{part}").measured(quick=options.quick)
        bars += of_part[0]
        rows += of_part[1]
    return finish("preparation", bars, rows)


if __name__ == "__main__":
    sys.exit(main())
