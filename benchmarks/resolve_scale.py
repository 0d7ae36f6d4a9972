"""Seconds to resolve the reshards of a Llama-70B block among many devices, and how they grow.

The block runs as 8-way tensor parallel replicas, sequence parallel around the norms, and hands over to the next stage.
Gradients are synchronised by ZeRO-1 among equal replicas, and for the other bar by slices among unequal ones: half of
the devices 8-way, half 4-way. Every repetition names other ranks, so that no cache helps. Seconds are those of the
processor, which depend less on what else runs. Beside the block stands what is worked out when it first runs: the
collectives of the slices of unequal groups.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.report import Bar, Row, finish, parser
from hetu_fx.annotations.annotation import Annotation, DeviceGroup, Duplicate, Partial, Sharding, Split, State
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.resolve.resolution import CommStep, Resolution, TopStep
from hetu_fx.comm_ops.resolve.resolve import resolve

TENSOR_PARALLEL = 8
WIDTH, FEED_FORWARD, KEYS, SEQUENCE = 8192, 28672, 1024, 4096
# name: (shape, the dim that tensor parallelism cuts; None for none)
PARAMETERS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "input norm": ((WIDTH,), None),
    "q": ((WIDTH, WIDTH), 0),
    "k": ((KEYS, WIDTH), 0),
    "v": ((KEYS, WIDTH), 0),
    "o": ((WIDTH, WIDTH), 1),
    "norm": ((WIDTH,), None),
    "gate": ((FEED_FORWARD, WIDTH), 0),
    "up": ((FEED_FORWARD, WIDTH), 0),
    "down": ((WIDTH, FEED_FORWARD), 1),
}
BAR_DEVICES, BAR_SECONDS, BAR_GROWTH = 1024, 0.2, 1.25
KINDS = ("tensor parallel", "sequence parallel", "gradient sync", "gather", "hand-over", "unequal groups")
BESIDE = ("slice groups", "switch plan")
ALWAYS = ("tensor parallel", "sequence parallel", "hand-over")
BLOCKS = {
    "equal replicas": (*ALWAYS, "gradient sync", "gather"),
    "unequal replicas": (*ALWAYS, "unequal groups"),
}


@dataclass(frozen=True, slots=True)
class Edge:
    """One reshard of the block; `gradient` is the cotangent of the target, if it is partial somewhere."""

    kind: str
    source: Annotation
    target: Annotation
    shape: tuple[int, ...]
    gradient: Annotation | None = None

    def resolve(self) -> Resolution:
        """Resolve it."""
        if self.gradient is None:
            return resolve(self.source, self.target, self.shape)
        return resolve(self.source, self.target, self.shape, self.gradient)


def block(ranks: Sequence[int]) -> Iterator[Edge]:
    """List the reshards of one block on `ranks`."""
    yield from activations(ranks)
    for shape, dim in PARAMETERS.values():
        yield from parameter(ranks, shape, dim)
        yield from unequal(ranks, shape, dim)
    half = len(ranks) // 2
    rows = Split.even(0, half // TENSOR_PARALLEL)
    lower = Annotation.on(ranks[:half], rows, Duplicate(TENSOR_PARALLEL))
    yield Edge("hand-over", lower, Annotation.on(ranks[half:], rows, Duplicate(TENSOR_PARALLEL)), batch(ranks))


def batch(ranks: Sequence[int]) -> tuple[int, ...]:
    """Give the shape of the activation between blocks."""
    return (len(ranks), SEQUENCE, WIDTH)


def activations(ranks: Sequence[int]) -> Iterator[Edge]:
    """List what attention and feed-forward communicate: Megatron's f and g, and their sequence parallel forms."""
    rows = Split.even(0, len(ranks) // TENSOR_PARALLEL)
    copies, sums, parts = (
        Annotation.on(ranks, rows, state)
        for state in (Duplicate(TENSOR_PARALLEL), Partial(TENSOR_PARALLEL), Split.even(1, TENSOR_PARALLEL))
    )
    for _ in ("attention", "feed-forward"):
        yield Edge("tensor parallel", copies, copies, batch(ranks), sums)
        yield Edge("tensor parallel", sums, copies, batch(ranks))
        yield Edge("sequence parallel", parts, copies, batch(ranks), sums)
        yield Edge("sequence parallel", sums, parts, batch(ranks))


def parameter(ranks: Sequence[int], shape: tuple[int, ...], dim: int | None) -> Iterator[Edge]:
    """List what the sync of a gradient and the gather of a parameter move under ZeRO-1."""
    replicas = len(ranks) // TENSOR_PARALLEL
    cut: State = Duplicate(TENSOR_PARALLEL) if dim is None else Split.even(dim, TENSOR_PARALLEL)
    share = Split.even(1 if dim == 0 else 0, replicas)
    home = Annotation.on(ranks, share, cut)
    yield Edge("gradient sync", Annotation.on(ranks, Partial(replicas), cut), home, shape)
    yield Edge("gather", home, Annotation.on(ranks, Duplicate(replicas), cut), shape)


def unequal(ranks: Sequence[int], shape: tuple[int, ...], dim: int | None) -> Iterator[Edge]:
    """List the sync of a gradient over two halves of unequal tensor parallel degree."""
    half = len(ranks) // 2
    groups = (DeviceGroup(tuple(ranks[:half])), DeviceGroup(tuple(ranks[half:])))
    shardings = []
    for degree in (TENSOR_PARALLEL, TENSOR_PARALLEL // 2):
        cut: State = Duplicate(degree) if dim is None else Split.even(dim, degree)
        shardings.append(Sharding((Duplicate(half // degree), cut)))
    source = Annotation(groups, tuple(shardings), Partial(2))
    yield Edge("unequal groups", source, Annotation(groups, tuple(shardings), Duplicate(2)), shape)


def switch(ranks: Sequence[int]) -> list[TensorMove]:
    """List what a switch of the block from 8-way to 4-way tensor parallelism moves."""
    return [
        TensorMove(*(layout(ranks, dim, degree) for degree in (TENSOR_PARALLEL, TENSOR_PARALLEL // 2)), shape, 2)
        for shape, dim in PARAMETERS.values()
    ]


def layout(ranks: Sequence[int], dim: int | None, degree: int) -> Annotation:
    """Lay a parameter out for some degree of tensor parallelism."""
    cut: State = Duplicate(degree) if dim is None else Split.even(dim, degree)
    return Annotation.on(ranks, Duplicate(len(ranks) // degree), cut)


def measure(num_devices: int, repetition: int) -> dict[str, float]:
    """Time one block on ranks that no other repetition uses, by kind of reshard."""
    first = num_devices * repetition
    ranks = range(first, first + num_devices)
    seconds = dict.fromkeys(KINDS, 0.0)
    steps: list[CommStep] = []
    for edge in list(block(ranks)):
        start = time.process_time()
        resolution = edge.resolve()
        seconds[edge.kind] += time.process_time() - start
        steps += resolution.steps
    start = time.process_time()
    for step in steps:
        if isinstance(step, TopStep):
            step.collectives()
    seconds["slice groups"] = time.process_time() - start
    moves = switch(ranks)
    start = time.process_time()
    plan_moves(moves, node_of=lambda rank: rank // 8)
    seconds["switch plan"] = time.process_time() - start
    return {name: sum(seconds[kind] for kind in kinds) for name, kinds in BLOCKS.items()} | seconds


def growth(rows: Sequence[Row], name: str) -> float:
    """Give the exponent of the growth of a block's seconds with the devices, by least squares in logarithms."""
    points = [(math.log(float(str(row["devices"]))), math.log(float(str(row[name])))) for row in rows]
    (mean_x, mean_y) = (statistics.fmean(values) for values in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw seconds over devices, both in logarithms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    devices = [row["devices"] for row in rows]
    for name in (*BLOCKS, *KINDS, *BESIDE):
        axes.loglog(
            devices, [row[name] for row in rows], marker="o", label=name, linewidth=2.5 if name in BLOCKS else 1
        )
    axes.axhline(BAR_SECONDS, linestyle=":", color="gray")
    axes.set_xlabel("devices")
    axes.set_ylabel("seconds for a Llama-70B block")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measure, draw and judge."""
    made = parser("resolve_scale", "Seconds to resolve a block's reshards among many devices.")
    made.add_argument("--folder", type=Path, help="where to put resolve_scale.png; left out: no picture")
    options = made.parse_args()
    sizes = (64, 256, 1024) if options.quick else (64, 128, 256, 512, 1024, 2048, 4096)
    measure(64, 1000)  # what is only done once is no part of the growth
    gc.freeze()  # nor is looking through torch's own objects for garbage
    rows = [row(size, 3 if options.quick else 5) for size in sizes]
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        plot(rows, options.folder / "resolve_scale.png")
    (at_bar,) = (row for row in rows if row["devices"] == BAR_DEVICES)
    bars = []
    for name in BLOCKS:
        seconds = float(str(at_bar[name]))
        bars.append(Bar(f"seconds for a block of {name} among {BAR_DEVICES}", seconds, BAR_SECONDS, at_least=False))
        bars.append(Bar(f"exponent of its growth, {name}", growth(rows, name), BAR_GROWTH, at_least=False))
    return finish("resolve_scale", bars, rows, reshards=len(list(block(range(64)))))


def row(num_devices: int, repetitions: int) -> Row:
    """Make a line of the table: the median of every kind."""
    found = [measure(num_devices, repetition) for repetition in range(repetitions)]
    names = (*BLOCKS, *KINDS, *BESIDE)
    medians = {name: statistics.median(times[name] for times in found) for name in names}
    return {"devices": num_devices, **medians}


if __name__ == "__main__":
    sys.exit(main())
