"""HAP's programs, op by op, beside the plans that come nearest and rows for each device, with and without factors sent.

Priced: what a program was found to take, and what its plan runs, both by HAP's prices, the latter from what the passes
deduce. What runs may take at most 1.02 of the program. Measured: programs on throttled processes, beside the best plan
without one; see `benchmarks.programs.measured`.
"""

from __future__ import annotations

import sys
import warnings

from benchmarks.kit.fleet import worker_parser
from benchmarks.kit.report import finish
from benchmarks.kit.smallest import few
from benchmarks.programs import measured, priced
from benchmarks.programs.cases import priced_cases, races

PRICED, MEASURED = "priced", "measured"


def main(arguments: list[str] | None = None) -> int:
    """Price and measure, or do one of them, or those whose names have a word."""
    made = worker_parser("programs", str(__doc__))
    made.add_argument("--part", choices=(PRICED, MEASURED), action="append", help="one of them (default: both)")
    made.add_argument("--only", default="", metavar="WORD", help="of the name of a model")
    made.add_argument("--race", help="what a worker runs")
    made.add_argument("--link-megabits", type=int, metavar="N", help="a node for each device, behind links of N Mbit/s")
    options = made.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.worker is not None:
        return measured.work(options.worker, options.race, quick=options.quick)
    rows, bars = [], []
    if PRICED in (options.part or (PRICED,)):
        chosen = few(case for case in priced_cases(options.quick) if options.only in case.subject.name)
        rows += (found := [row for case in chosen for row in priced.rows_of(case)])
        bars += priced.bars(found)
    if MEASURED in (options.part or (MEASURED,)):
        chosen_races = few(race for race in races(options.quick) if options.only in race.name)
        limits = {"quick": options.quick, "link_megabits": options.link_megabits}
        rows += (found := [row for race in chosen_races for row in measured.measured(race, **limits)])
        bars += measured.bars(found)
    return finish("programs", bars, rows)


if __name__ == "__main__":
    sys.exit(main())
