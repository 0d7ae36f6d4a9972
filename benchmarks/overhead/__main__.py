"""`python -m benchmarks.overhead`: steps beside eager and DDP, and what the host does besides the model's own ops."""

import sys
from pathlib import Path

from benchmarks.kit.fleet import in_fleet, worker_parser, write_result
from benchmarks.kit.models import Size
from benchmarks.kit.report import finish
from benchmarks.overhead import host, steps

PARTS = {"steps": steps.measured, "host": host.measured}


def main() -> int:
    """Run the parts and judge them; or be a process of one."""
    made = worker_parser("overhead", "One process against eager, two against DDP; the host's work beside the model's.")
    made.add_argument("--part", choices=PARTS, help="only this one")
    made.add_argument("--size", type=int, nargs=4, help="of a contest's model")
    options = made.parse_args()
    if options.worker is not None:
        return work(options.worker, options.part, options.size, quick=options.quick)
    found = [part(quick=options.quick) for name, part in PARTS.items() if options.part in (None, name)]
    return finish("overhead", [bar for bars, _ in found for bar in bars], [row for _, rows in found for row in rows])


def work(result: Path, part: str, size: list[int] | None, *, quick: bool) -> int:
    """Be one process."""
    with in_fleet():
        write_result(result, host.work(quick=quick) if size is None else steps.work(Size(*size), quick=quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
