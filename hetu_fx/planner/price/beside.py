"""Seconds of sums that travel beside the products before and after them (`transforms.lowering.overlap`).

In the forward the products whose results are summed are made in slices, where that pays: of both the longer one is
seen, and a slice of the other. In the backward the gradient of what products read is summed while those of their
weights are made, which take as long as the products did:

    sums          m (T(n) - T(1)) less, of m sums, T(n) being what one and its product take in n slices   (2a)
    returns       of each max(s - p, h) instead of s, h being what of s the processor takes that computes (2b)

For the rows of a micro-batch; of one of fewer rows in proportion. Not where the schedule makes gradients of weights
later, nor in the forward of blocks that are recomputed, whose products stand in runs of their own. What
`planner.simulate` plays has it too; searches look ahead without it.
"""

from __future__ import annotations

from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.overlap import OverlapCost
from hetu_fx.planner.price.stage_seconds import StageCosts
from hetu_fx.planner.values.line import Line
from hetu_fx.plans.plan import Schedule
from hetu_fx.plans.schedule import cuts_backwards
from hetu_fx.transforms.lowering.slice_counts import SUM, Slicing


def overlap_sums(costs: StageCosts, rows: int, schedule: Schedule, cluster: Cluster) -> StageCosts:
    """Return a stage's costs for micro-batches of so many rows, with what its sums hide."""
    stage, parts = costs.stage, costs.parts
    is_group = len(stage.devices) > 1 and not (stage.is_grid or stage.shares_sequence) and costs.repeated_parts == 1
    if not is_group or cuts_backwards(schedule):
        return costs
    kept = 1 - stage.recompute / stage.blocks if stage.blocks else 1.0
    forward = _hidden_by_slices(_one(costs, rows, parts.num_summed, parts.summed_flops, parts.summed_bytes, cluster))
    backward = _hidden_by_gradients(
        _one(costs, rows, parts.num_beside, parts.beside_flops, parts.beside_bytes, cluster)
    )
    return replace(
        costs,
        sums=_less(costs.sums, kept * parts.num_summed * forward, rows),
        returns=_less(costs.returns, parts.num_beside * backward, rows),
    )


def seen_shares(costs: StageCosts, rows: int, schedule: Schedule, cluster: Cluster) -> tuple[float, float]:
    """Return what share is seen of the seconds that bytes take: of sums in the forward, and in the backward."""
    beside = overlap_sums(costs, rows, schedule, cluster)
    pairs = ((beside.sums, costs.sums), (beside.returns, costs.returns))
    forward, backward = (seen.slope / alone.slope if alone.slope else 1.0 for seen, alone in pairs)
    return forward, backward


def _one(
    costs: StageCosts, rows: int, count: int, flops: float, num_bytes: float, cluster: Cluster
) -> OverlapCost | None:
    """Return one of some sums, and its products; None where there are none."""
    if not count:
        return None
    slicing = Slicing(cluster, costs.stage)
    return slicing.beside(rows, costs.stage.devices, SUM, flops / count, num_bytes / count)


def _hidden_by_slices(one: OverlapCost | None) -> float:
    return 0.0 if one is None else one.seconds(1) - one.seconds(one.slices)


def _hidden_by_gradients(one: OverlapCost | None) -> float:
    if one is None:
        return 0.0
    sent = one.sent_seconds(1.0)
    return sent - min(sent, max(sent - one.product_seconds, one.host_seconds))


def _less(line: Line, seconds: float, rows: int) -> Line:
    """Return a line that is lower by some seconds for so many rows, and nowhere below what it is for none."""
    return Line(line.fixed, max(0.0, line.slope - seconds / rows))
