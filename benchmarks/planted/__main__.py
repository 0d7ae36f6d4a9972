"""Wrong moves, planted in what is decided, each found by training as all ranks in one process.

In worlds of 2 to 64 ranks one decision at a time is made wrong (a slice is shifted, a summand counts twice, a copy is
not sent); training must then raise an error, or differ from one device. All must be found.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from random import Random

from benchmarks.kit.report import Bar, finish, parser
from benchmarks.kit.smallest import few
from benchmarks.planted.hunt import Found, Hunt, row_of
from benchmarks.planted.worlds import WORLDS

FAULTS = 200
QUICK = 40
SEED = 21
# Of so many faults, how many in which world: more where a run is short.
_SHARES = {2: 24, 3: 24, 4: 24, 6: 20, 8: 18, 16: 12, 64: 6}


def worlds_of(count: int) -> list[str]:
    """Share faults out among worlds; every world has one."""
    shares = {name: _SHARES[world.ranks] for name, world in WORLDS.items()}
    least = {name: max(1, count * share // sum(shares.values())) for name, share in shares.items()}
    first = max(shares, key=lambda name: shares[name])
    least[first] += count - sum(least.values())
    return [name for name, number in least.items() for _ in range(number)]


def main(arguments: list[str] | None = None) -> int:
    made = parser("planted", str(__doc__))
    made.add_argument("--seed", type=int, default=SEED, help="of what is drawn (default: %(default)s)")
    made.add_argument("--ranks", type=int, help="only worlds of so many ranks")
    options = made.parse_args(arguments)
    warnings.simplefilter("ignore")
    random = Random(options.seed)
    hunts = {name: Hunt(name, Random(random.random())) for name in WORLDS}
    found = []
    for name in few(worlds_of(QUICK if options.quick else FAULTS), 2):
        if options.ranks in (None, WORLDS[name].ranks):
            found.append(hunts[name].plant())
            print(".", end="", file=sys.stderr, flush=True)
    return _told(found, options.seed)


def _told(found: list[Found], seed: int) -> int:
    shown = [one for one in found if one.shown]
    by = Counter((one.ranks, one.fault.kind, one.fault.family, one.shown or "NOTHING") for one in found)
    rows = [
        {"ranks": ranks, "fault": kind, "in": family, "shown by": what, "faults": count}
        for (ranks, kind, family, what), count in sorted(by.items())
    ]
    rows += [row_of(one) for one in found if not one.shown]
    bar = Bar("planted wrong moves that are found", len(shown) / len(found), 1.0, at_least=True)
    return finish("planted", [bar], rows, faults=len(found), found=len(shown), seed=seed)


if __name__ == "__main__":
    sys.exit(main())
