"""Programs and clusters that the planner's tests share."""

from dataclasses import replace
from functools import reduce
from operator import add

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Pipeline

FAST_LINK = Link(1e10, 1e-6)


def transformer(
    layers: int = 4, rows: int = 16, length: int = 64, width: int = 64, vocabulary: int = 512, units: int = 4
) -> ProgramCosts:
    """Return costs like those of a small decoder with `layers` blocks."""
    weights = 12 * width * width
    flops = 2 * length * weights + 4 * length * length * width
    kept = 30 * length * width * 4
    block = PartCosts(
        flops=flops,
        split_flops=flops,
        traffic_bytes=80 * length * width,
        split_traffic_bytes=40 * length * width,
        activation_bytes=kept,
        split_activation_bytes=kept // 2,
        parameter_bytes=4 * weights,
        split_parameter_bytes=4 * weights,
        reduced_bytes=8 * length * width,
        num_reductions=2,
        returned_bytes=8 * length * width,
        num_returns=2,
        sequence_traffic_bytes=20 * length * width,
        sequence_activation_bytes=kept // 4,
        num_ops=40,
    )
    table = 4 * vocabulary * width
    before = PartCosts(traffic_bytes=8 * length * width, parameter_bytes=table, num_ops=3)
    head = 2 * length * width * vocabulary
    after = PartCosts(head, activation_bytes=4 * length * vocabulary, parameter_bytes=table, num_ops=8)
    boundaries = (4.0 * length * width,) * (layers - 1)
    return ProgramCosts(rows, before, (block,) * layers, after, boundaries, units)


def parted(pipeline: Pipeline, costs: ProgramCosts) -> PartedPipeline:
    """Return the parts of a pipeline that runs the program, one for each stage."""
    return PartedPipeline.of(pipeline, costs.num_blocks)


def rising(costs: ProgramCosts) -> ProgramCosts:
    """Return the costs with blocks of which each is as many times the first one as its number, from 1."""
    blocks = tuple(reduce(add, [block] * number) for number, block in enumerate(costs.blocks, 1))
    return replace(costs, blocks=blocks)


def paper(*speeds: float, memory_bytes: int = 1 << 40, nodes: str = "", inter: Link | None = None) -> Cluster:
    """Return a cluster with speeds in GFLOP/s and one letter per node."""
    flops = [speed * 1e9 for speed in speeds]
    return Cluster.on_paper(flops, memory_bytes=memory_bytes, nodes=nodes, intra=FAST_LINK, inter=inter)
