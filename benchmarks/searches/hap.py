"""Seconds that the HAP search takes, and how good its programs are, from MLPs to GPT-2 on 2 to 64 devices.

Half the devices are twice as fast as the others; links carry 10 GB/s. Models are captured without weights. Seconds
are those of the processor, which depend less on what else runs; capturing is left out. The step is shown beside what
the two shares that a plan can say for all devices take by the same prices: rows (data parallel) or one tensor
parallel group; and beside what parts of whole indices take.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.kit.models import batch, gpt2
from benchmarks.kit.nets import Convolutions, Experts, Mlp
from benchmarks.kit.report import Bar, Row, finish, parser
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.graph.capture import capture
from hetu_fx.planner.count.graph_problem import graph_problem_of
from hetu_fx.planner.search.hap.adapter import translations
from hetu_fx.planner.search.hap.search import search
from hetu_fx.planner.values.tensor_program import TensorProgram
from hetu_fx.transforms.layouts.analysed_graph import Analyse, AnalysedGraph
from tests.oracles.hap_programs import rounded_seconds

FAST, SLOW = 2e13, 1e13
LINK = Link(1e10, 1e-5)
BAR_SECONDS = 5.0  # GPT-2 of width 768 on 8 devices, at 2 and at 12 layers


def main() -> int:
    """Measure and judge."""
    options = parser("searches.hap", "Seconds and quality of the HAP search.").parse_args()
    rows = [row for name, problem in models(options.quick) for row in measure(name, problem, options.quick)]
    bars = [
        Bar(f"seconds for {row['model']} on 8 devices", float(str(row["seconds"])), BAR_SECONDS, False)
        for row in rows
        if "gpt2-768" in str(row["model"]) and row["devices"] == 8
    ]
    bars += [Bar("least of the plan's step over the program's", least_loss(rows), 1 - 1e-6, True)]
    return finish("searches.hap", bars, rows)


def least_loss(rows: list[Row]) -> float:
    """Return the least ratio of a plan's seconds and those of the program it is near to: none is below 1."""
    return min(float(str(row["plan ms"])) / float(str(row["step ms"])) for row in rows)


def models(quick: bool) -> Iterator[tuple[str, TensorProgram]]:
    """Yield the models with a batch of a size at which no way to share is plainly best."""
    image = {"x": torch.randn(8, 3, 32, 32)}
    sequence = {"x": torch.randn(8, 64, 512)}
    for layers in (2, 12):
        yield f"mlp-512 x{layers}", graph_problem_of(graph_of(lambda n=layers: Mlp(512, n), sequence), rows=64).program  # type: ignore[misc]
        if not quick or layers == 2:
            model: Callable[[], nn.Module] = lambda n=layers: gpt2(768, n)  # type: ignore[misc]  # noqa: E731
            graph = graph_of(model, batch(4, 128, vocabulary=50257), own_loss=True)
            yield f"gpt2-768 x{layers}", graph_problem_of(graph, rows=32).program
    yield "convolutions", graph_problem_of(graph_of(Convolutions, image), rows=256).program
    yield "experts-512", graph_problem_of(graph_of(lambda: Experts(512, 64), sequence), rows=64).program


def graph_of(make: Callable[[], nn.Module], example: dict[str, Tensor], *, own_loss: bool = False) -> AnalysedGraph:
    """Capture a model without weights."""
    with torch.device("meta"):
        model = make()
    return Analyse()(capture(model, example, loss_fn=None if own_loss else lambda out, **batch: out))


def measure(name: str, problem: TensorProgram, quick: bool) -> Iterator[Row]:
    """Search for clusters of several sizes."""
    for count in (2, 8) if quick else (2, 8, 64):
        speeds = [FAST] * (count // 2) + [SLOW] * (count // 2)
        cluster = Cluster.on_paper(speeds, intra=LINK)
        start = time.process_time()
        result = search(problem, cluster)
        seconds = time.process_time() - start
        nearest = translations(problem, result, cluster)[0]
        kind = "rows" if len(nearest.plan.pipelines) > 1 else "group"
        yield {
            "model": name,
            "devices": count,
            "ops": len(problem.ops),
            "seconds": seconds,
            "states": result.num_states,
            "proved": result.is_exact,
            "step ms": 1e3 * result.seconds,
            "whole parts ms": 1e3 * rounded_seconds(result),
            "plan": kind + (" + sequence" if nearest.plan.sequence_parallel else ""),
            "plan ms": 1e3 * nearest.seconds,
            "exchanges": len(result.transfers),
        }


if __name__ == "__main__":
    sys.exit(main())
