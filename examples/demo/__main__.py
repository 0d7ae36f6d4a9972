"""A small model on four unequal emulated devices, beside DDP, on one screen: `python -m examples.demo`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from examples.demo.demo import DEFAULT_FOLDER, run_demo
from hetu_fx.errors import HetuFxError
from hetu_fx_emulate.emulation_plan import LimitChoice


def main() -> int:
    """Run the demo; the status is 0 when the result is that of one process, 2 for an error that is explained."""
    parser = argparse.ArgumentParser("python -m examples.demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_FOLDER, metavar="FOLDER", help="for the report, its pictures and JSON"
    )
    parser.add_argument("--limit", choices=get_args(LimitChoice), default="auto", help="how speeds are enforced")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options = parser.parse_args()
    try:
        return run_demo(options.output, quick=options.quick, limit=options.limit, as_json=options.json)
    except HetuFxError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
