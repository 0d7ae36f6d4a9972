"""Published plans, each executed by all of its ranks in one process, on a small model of as many blocks.

Hetu v2's 14 strategies for H20 and H800, HeteroPP on 64 devices of four kinds, HAP on 8 and 21: two steps in float64,
beside one device. Seconds are those of a step of the model that a plan was made for: predicted, and published.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from time import perf_counter

import torch

from benchmarks.kit.report import Bar, Row, finish, parser
from benchmarks.traces.published import Trace, traces
from hetu_fx.cli.verdict import judge
from hetu_fx.lockstep import Lockstep, train_alone

TOLERANCE = 1e-10
STRATEGIES = 14
HOW = Lockstep(partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def main(arguments: list[str] | None = None) -> int:
    """Execute them, or those whose names have a word."""
    made = parser("traces", str(__doc__))
    made.add_argument("--only", default="", metavar="WORD", help="of the paper or the name of a plan")
    options = made.parse_args(arguments)
    warnings.simplefilter("ignore")
    chosen = [trace for trace in traces() if options.only in f"{trace.paper}: {trace.name}"]
    rows = []
    for trace in chosen[:: 5 if options.quick else 1]:
        rows.append(executed(trace))
        print(f"{trace.paper} {trace.name}: {rows[-1]['loss difference']:.1e}", file=sys.stderr, flush=True)
    worst = max(float(str(row[f"{what} difference"])) for row in rows for what in ("loss", "gradient", "parameter"))
    bars = [Bar("largest difference to one device / 1e-10", worst / TOLERANCE, 1.0, at_least=False)]
    if not options.quick and not options.only:
        count = sum(row["paper"] == "Hetu v2" for row in rows)
        bars.append(Bar("strategies of Hetu v2 that were executed", count, STRATEGIES, at_least=True))
    return finish("traces", bars, rows)


def executed(trace: Trace) -> Row:
    """Execute a plan, and compare it with one device."""
    model, batches = trace.model(), trace.batches()
    alone, start = train_alone(model, batches, HOW), perf_counter()
    verdict = judge(trace.name, alone, HOW.train(model, batches, trace.plan), TOLERANCE, "")
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
        "seconds to execute": round(perf_counter() - start, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
