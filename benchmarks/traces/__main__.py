"""Published plans, each executed by all of its ranks in one process, on a small model of as many blocks.

Hetu v2's 14 strategies for H20 and H800, HeteroPP on 64 devices of four kinds, HAP on 8 and 21: two steps in float64,
beside one device. Seconds are those of a step of the model that a plan was made for: predicted, and published.

And Hetu v2's elastic traces, in which devices are lost (`elastic`): what steps and changes take, and the same executed.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter

import torch

from benchmarks.kit.report import Bar, Row, finish, parser, table
from benchmarks.traces.elastic import ELASTIC, changes
from benchmarks.traces.elastic import executed as executed_trace
from benchmarks.traces.published import Trace, traces
from hetu_fx.cli.verdict import Verdict, judge
from hetu_fx.lockstep import Lockstep, train_alone

TOLERANCE = 1e-10
STRATEGIES = 14
DIFFERENCES = ("loss", "gradient", "parameter")
PARTS = ("plans", "elastic")
HOW = Lockstep(partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def main(arguments: list[str] | None = None) -> int:
    """Execute them, or those whose names have a word."""
    made = parser("traces", str(__doc__))
    made.add_argument("--only", default="", metavar="WORD", help="of the paper or the name of a plan")
    made.add_argument("--part", choices=PARTS, action="append", help="one of them (default: all)")
    options = made.parse_args(arguments)
    warnings.simplefilter("ignore")
    parts = options.part or PARTS
    rows = list(_plans(options.only, quick=options.quick)) if "plans" in parts else []
    names = [name for name in ELASTIC if "elastic" in parts and options.only in f"Hetu v2: {name} trace"]
    planned = [row for name in names for row in changes(name)]
    print(table(planned) if planned else "", file=sys.stderr, flush=True)
    rows += [_told(_trace_row(name)) for name in names if not options.quick]
    is_whole = not options.quick and not options.only
    return finish("traces", _bars(rows, parts if is_whole else ()), rows, changes=planned)


def _bars(rows: Sequence[Row], parts: Sequence[str]) -> list[Bar]:
    """Return how near to one device all is that was executed, and whether that is all of Hetu v2, of whole parts."""
    differences = [float(str(row[f"{what} difference"])) / TOLERANCE for row in rows for what in DIFFERENCES]
    bars = [Bar("largest difference to one device / 1e-10", max(differences), 1.0, at_least=False)] if rows else []
    count, most = sum(row["paper"] == "Hetu v2" for row in rows), {"plans": STRATEGIES, "elastic": len(ELASTIC)}
    if parts:
        wanted = sum(most[part] for part in parts)
        bars.append(Bar("strategies and traces of Hetu v2 that were executed", count, wanted, at_least=True))
    return bars


def _plans(only: str, *, quick: bool) -> Iterator[Row]:
    """Execute the plans whose names have a word."""
    chosen = [trace for trace in traces() if only in f"{trace.paper}: {trace.name}"]
    for trace in chosen[:: 5 if quick else 1]:
        yield _told(executed(trace))


def _told(row: Row) -> Row:
    print(f"{row['paper']} {row['plan']}: {row['loss difference']:.1e}", file=sys.stderr, flush=True)
    return row


def _trace_row(name: str) -> Row:
    """Execute an elastic trace."""
    start = perf_counter()
    trace, verdict = executed_trace(name, HOW)
    return _row(trace, verdict, perf_counter() - start)


def executed(trace: Trace) -> Row:
    """Execute a plan, and compare it with one device."""
    model, batches = trace.model(), trace.batches()
    alone, start = train_alone(model, batches, HOW), perf_counter()
    verdict = judge(trace.name, alone, HOW.train(model, batches, trace.plan), TOLERANCE, "")
    return _row(trace, verdict, perf_counter() - start)


def _row(trace: Trace, verdict: Verdict, seconds: float) -> Row:
    return {
        "paper": trace.paper,
        "plan": trace.name,
        "ranks": len(trace.plan.devices),
        "blocks": trace.blocks,
        "stages": " | ".join(
            ">".join(str(len(stage.devices)) for stage in pipeline.stages) for pipeline in trace.plan.pipelines
        ),
        "predicted s": "" if trace.predicted is None else round(trace.predicted, 3),
        "published s": "" if trace.published is None else trace.published,
        "loss difference": max(step.loss_difference for step in verdict.steps),
        "gradient difference": max(step.gradient_difference for step in verdict.steps),
        "parameter difference": verdict.parameter_difference,
        "seconds to execute": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
