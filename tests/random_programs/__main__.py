"""Random small models under random plans, against one device: `python -m tests.random_programs --seconds 600`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence

import torch

from tests.ops.trial import Kind
from tests.random_programs.database_step import use_database
from tests.random_programs.run import Pair, of_program, pairs, shrunk

MOST_SHRUNK = 10
"""How many bad pairs are made small: each takes up to a minute."""


def main(given: Sequence[str] | None = None) -> int:
    """Try pairs, print the bad ones made small, then counts, and JSON at last; 0 if none is bad."""
    options = _options(given)
    torch.set_num_threads(1)
    if not options.no_database:
        use_database()
    bad: list[Pair] = []
    counts: Counter[Kind] = Counter()
    refused: Counter[str] = Counter()
    found = (
        pairs(options.seed, options.seconds) if options.program is None else of_program(options.seed, options.program)
    )
    for pair in found:
        counts[pair.kind] += 1
        if pair.kind in (Kind.CRASH, Kind.WRONG):
            bad.append(pair)
            print(f"{pair.kind.value} (seed {pair.seed}): {pair.why[:300]}", flush=True)
        if pair.kind is Kind.REFUSED:
            refused[re.sub(r"<random program \d+>:\d+", "...", pair.why)[:90]] += 1
        if counts.total() % 100 == 0:
            print(f"{counts.total()} pairs: {_text(counts)}", file=sys.stderr, flush=True)
    for pair in _distinct(bad)[:MOST_SHRUNK]:
        print(shrunk(pair, options.shrink_seconds).text, flush=True)
    print(_text(counts))
    print("\n".join(f"{count:6} refused: {why}" for why, count in refused.most_common(12)))
    values = {kind.value: counts[kind] for kind in Kind}
    bars = [{"name": name, "value": values[name], "bar": 0, "holds": not values[name]} for name in ("wrong", "crash")]
    print(json.dumps({"benchmark": "random_programs", "bars": bars, "pairs": counts.total(), **values}))
    return 0 if all(bar["holds"] for bar in bars) else 1


def _text(counts: Counter[Kind]) -> str:
    return ", ".join(f"{counts[kind]} {kind.value}" for kind in Kind)


def _distinct(bad: Sequence[Pair]) -> list[Pair]:
    """Return the first bad pair of each program."""
    return list({pair.program: pair for pair in reversed(bad)}.values())[::-1]


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to try pairs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of programs and plans (default: %(default)s)")
    parser.add_argument("--program", type=int, metavar="N", help="only the N-th program of this seed")
    parser.add_argument("--no-database", action="store_true", help="no ops of torch's operator database")
    parser.add_argument("--shrink-seconds", type=float, default=60.0, help="for each bad pair (default: %(default)s)")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
