"""Published plans, each executed by all of its ranks in one process, on a small model of as many blocks.

Hetu v2's 14 strategies for H20 and H800, HeteroPP on 64 devices of four kinds, HAP on 8 and 21, Hydraulis' pool on 64:
steps in float64, beside one device. Seconds are those of a step of the model that a plan was made for: predicted, and
published.

And Hetu v2's elastic traces, in which devices are lost (`elastic`): what steps and changes take, and the same executed.

All of it takes an hour. `--kept FILE` appends what has been executed to a file, and takes from there what it has, so
that a run can be made in parts; the seconds to execute are then those of several runs.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from time import perf_counter

from benchmarks.kit.report import Bar, Row, finish, parser, table
from benchmarks.kit.smallest import few
from benchmarks.traces.elastic import ELASTIC, changes, elastic, priced_bytes
from benchmarks.traces.published import traces
from benchmarks.traces.trace import TOLERANCE, Named, Trace

PLANS = 14 + 1 + 1 + 8  # of Hetu v2, H2, HAP and Hydraulis
DIFFERENCES = ("loss", "gradient", "parameter")
PARTS = ("plans", "elastic")


def main(arguments: list[str] | None = None) -> int:
    """Execute them, or those whose names have a word."""
    made = parser("traces", str(__doc__))
    made.add_argument("--only", default="", metavar="WORD", help="of the paper or the name of a plan")
    made.add_argument("--part", choices=PARTS, action="append", help="one of them (default: all)")
    made.add_argument("--kept", type=Path, metavar="FILE", help="rows of runs before, to which those of this are added")
    options = made.parse_args(arguments)
    kept = Kept(options.kept)
    warnings.simplefilter("ignore")
    parts = options.part or PARTS
    rows = list(_plans(options.only, kept, quick=options.quick)) if "plans" in parts else []
    names = [name for name in ELASTIC if "elastic" in parts and options.only in f"Hetu v2: {name} trace"]
    planned = [row for name in names for row in changes(name)]
    print(table(planned) if planned else "", file=sys.stderr, flush=True)
    rows += [kept.row(Named("Hetu v2", f"{name} trace", partial(elastic, name))) for name in names if not options.quick]
    is_whole = not options.quick and not options.only
    return finish("traces", _bars(rows, parts if is_whole else ()), rows, changes=planned)


def _bars(rows: Sequence[Row], parts: Sequence[str]) -> list[Bar]:
    """Return how near to one device all is that was executed, and whether that is all of whole parts."""
    differences = [float(str(row[f"{what} difference"])) / TOLERANCE for row in rows for what in DIFFERENCES]
    bars = [Bar("largest difference to one device / 1e-10", max(differences), 1.0, at_least=False)] if rows else []
    if parts:
        wanted = sum({"plans": PLANS, "elastic": len(ELASTIC)}[part] for part in parts)
        bars.append(Bar("plans and traces that were executed", len(rows), wanted, at_least=True))
    return bars


class Kept:
    """Rows of runs before, in a file of a JSON object a line; without a file there are none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._rows: dict[tuple[str, str], Row] = {(row["paper"], row["plan"]): row for row in map(json.loads, lines)}

    def row(self, named: Named) -> Row:
        """Return the row of a trace, which is executed where it is not kept."""
        key = named.paper, named.name
        if key not in self._rows:
            made = self._rows[key] = executed(named.make())
            print(f"{named.paper} {named.name}: {made['loss difference']:.1e}", file=sys.stderr, flush=True)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(made) + "\n")
        return self._rows[key]


def _plans(only: str, kept: Kept, *, quick: bool) -> Iterator[Row]:
    """Execute the plans whose names have a word."""
    chosen = [one for one in traces() if only in f"{one.paper}: {one.name}"]
    for one in few(chosen[:: 5 if quick else 1]):
        yield kept.row(one)


def executed(trace: Trace) -> Row:
    """Execute a trace, and tell what came of it."""
    start = perf_counter()
    verdict, moved = trace.execute()
    first = trace.plans[0]
    row = {
        "paper": trace.paper,
        "plan": trace.name,
        "ranks": len(first.devices),
        "blocks": trace.blocks,
        "stages": " | ".join(_runs([">".join(str(len(stage.devices)) for stage in p.stages) for p in first.pipelines])),
        "predicted s": "" if trace.predicted is None else round(trace.predicted, 3),
        "published s": "" if trace.published is None else trace.published,
        "loss difference": max(step.loss_difference for step in verdict.steps),
        "gradient difference": max(step.gradient_difference for step in verdict.steps),
        "parameter difference": verdict.parameter_difference,
        "seconds to execute": round(perf_counter() - start, 1),
    }
    return row if trace.lost is None else row | _moved_of(trace, moved)


def _runs(texts: Sequence[str]) -> Iterator[str]:
    """Yield texts, those that follow each other and are the same as one."""
    for text, group in groupby(texts):
        count = len(list(group))
        yield text if count == 1 else f"{count} x {text}"


def _moved_of(trace: Trace, moved: Sequence[int]) -> Row:
    """Return what an elastic trace has moved, of the small model, beside what the planner prices for that."""
    priced = list(priced_bytes(trace))
    return {
        "moved MB": " ".join(f"{size / 1e6:.4g}" for size in moved),
        "moved / priced": " ".join(f"{own / size:.3f}" for own, size in zip(moved, priced, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
