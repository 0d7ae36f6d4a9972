"""HAP's programs, op by op, beside the plans that come nearest and rows for each device, with and without factors sent.

Priced: what a program was found to take, and what its plan runs, both by HAP's prices, the latter from what the passes
deduce. What runs may take at most 1.02 of the program.
"""

from __future__ import annotations

import sys
import warnings

from benchmarks.kit.report import finish, parser
from benchmarks.programs.cases import cases
from benchmarks.programs.priced import bars, rows_of


def main(arguments: list[str] | None = None) -> int:
    """Price them, or those whose names have a word."""
    made = parser("programs", str(__doc__))
    made.add_argument("--only", default="", metavar="WORD", help="of the name of a model")
    options = made.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows = [row for case in cases(options.quick) if options.only in case.name for row in rows_of(case)]
    return finish("programs", bars(rows), rows)


if __name__ == "__main__":
    sys.exit(main())
