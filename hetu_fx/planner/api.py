"""Plan, profile and simulate without running: nothing here needs the devices, and nothing of the model is changed.

`plan` finds what `auto_parallelize(plan="auto")` would choose; `profile` writes down what planning needs to know of a
model, so that the rest can be done elsewhere, without it; `simulate` tells what a step under a plan would be.

How fast each device of a job is on a model's own blocks: all run them at once, as they do in training. Products of
matrices tell how fast devices are, one beside another. What a model makes of a device they do not tell: how wide its
products are, what ops between them move, what running an op takes. Nor does one device alone tell what it is among
others that share its processor and its memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor, nn

from hetu_fx.base.progress import Tell, telling
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.consensus import all_gather_object, broadcast_from_rank0, from_first, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.graph.bind import Batch
from hetu_fx.graph.row_dims import AskedRowDims
from hetu_fx.planner.captured_program import CapturedProgram, PlannedProgram
from hetu_fx.planner.count.optimizer_state import Asked, optimizer_state_of
from hetu_fx.planner.left_out import with_reasons
from hetu_fx.planner.measure.block_times import (
    BlockShard,
    Measuring,
    check_measurable,
    make_block_shard,
    merge_profiles,
    time_shard,
    with_times,
)
from hetu_fx.planner.measure.fit import counted_seconds, distinct_blocks
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.searches import DEFAULT
from hetu_fx.planner.simulate.simulate import simulate as simulate_step
from hetu_fx.planner.simulate.simulation import Simulation
from hetu_fx.planner.values.options import Choice, PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan, Schedule
from hetu_fx.program.captures import Programs
from hetu_fx.program.lazy import check_shapes
from hetu_fx.program.program import Program

SECONDS = 3.0
"""How long devices run blocks: several periods of a quota, and many runs of a block."""

WINDOWS = 5
"""Into so many parts that time is cut."""

MOST_ROWS = 4
"""Rows of a run: what an op takes besides its work counts as little as in training."""

FULL_TOKENS = 512
"""Of shorter sequences a run has more rows, up to so many tokens: products of fewer take longer for each of them."""


@dataclass(frozen=True, eq=False)
class OwnBlocks:
    """The distinct blocks of a model, each whole, ready to run on this process's device.

    Attributes:
        costs: of the program.
        blocks: one of each kind with its inputs, and how many there are.
        rows: of the inputs.
    """

    costs: ProgramCosts
    blocks: tuple[tuple[BlockShard, Sequence[Tensor], int], ...]
    rows: int

    @classmethod
    def of(cls, program: CapturedProgram, costs: ProgramCosts, place: torch.device, world_size: int) -> OwnBlocks:
        """Make them ready, with about as many rows as each of `world_size` devices has.

        Raises `ProfileError` where the model has none, or they cannot be run apart.
        """
        check_measurable(costs, program.program, place)
        rows = max(1, min(most_rows(program.length), costs.rows // world_size))
        shards = [
            (make_block_shard(program.program, block, 1, place), count) for block, count in distinct_blocks(costs)
        ]
        ready = tuple((shard, shard.inputs(program.length or 1, place, rows=rows), count) for shard, count in shards)
        return cls(costs, ready, rows)

    def speed_up(self, cluster: Cluster, rank: int, seconds: float = SECONDS) -> float:
        """Return how many times as fast this device is as the cluster says; takes about so many seconds, on any device.

        The median of means is taken: a mean has what a quota withholds, and the median leaves out what disturbs. The
        first window is not counted: it warms up, and uses up what quota was saved before.
        """
        _, *means = [self._mean_seconds(seconds / WINDOWS) for _ in range(1 + WINDOWS)]
        return counted_seconds(self.costs, rank, cluster, self.rows) / median(means)

    def _mean_seconds(self, seconds: float) -> float:
        """Return what all blocks of the model take forward and backward, on the average over so many seconds."""
        start, passes = time.perf_counter(), list[float]()
        while not passes or time.perf_counter() - start < seconds:
            passes.append(sum(time_shard(shard, inputs, count) for shard, inputs, count in self.blocks))
        return fmean(passes)


def most_rows(length: int) -> int:
    """Return the rows of a run at the most, of sequences of so many tokens; 0: rows have none."""
    return max(MOST_ROWS, math.ceil(FULL_TOKENS / length)) if length else MOST_ROWS


def measure_on_blocks(blocks: OwnBlocks, cluster: Cluster, table: GroupTable, seconds: float = SECONDS) -> Cluster:
    """Return the cluster as fast as its devices are on a model's blocks; collective, the same on every rank."""
    all_gather_object(table, None)  # all start together
    found = all_gather_object(table, raise_on_all_ranks(table, lambda: blocks.speed_up(cluster, table.rank, seconds)))
    return cluster.with_speeds({d.rank: d.flops_per_second * found[d.rank] for d in cluster.devices})


AskedDims = Mapping[str, int | None] | None


def plan(
    model: nn.Module,
    batch: Batch,
    *,
    cluster: Cluster | str | Path | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    name: str = "auto",
    search: str = DEFAULT,
    allow: str | Sequence[str] = (),
    forbid: str | Sequence[str] = (),
    zero: int | None = None,
    seconds: float | None = None,
    optimizer: Asked = None,
    before: Plan | str | Path | None = None,
    steps_ahead: float = math.inf,
    row_dims: AskedDims = None,
) -> Plan:
    """Return the fastest plan that fits for training `model` on a cluster; nothing is run or changed.

    Write it with `Plan.write`, edit it, give it to `auto_parallelize(plan=...)`, or read it by `print(plan.explain())`.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: an example of the whole batch of a step, of all devices together; its values are not read.
        cluster: the devices, or the path of a cluster file; None measures the processes of this job (collective).
        loss_fn: as for `auto_parallelize`.
        row_dims: as for `auto_parallelize`.
        name: the plan's name.
        search: how to search, one of docs/planning.md; those that answer with one plan.
        allow: names of what plans may do besides: "data_parallel", "tensor_parallel", "pipeline", "context",
            "sequence_parallel", "recompute", "zero", "whole_states", "whole_gradients", "zero_2", "zero_3", "uneven",
            and "bfloat16", in which stages compute where the cluster says that it is faster, and which changes numbers.
        forbid: names, of the same, of what they must not do.
        zero: what replicas share, 0 to 3: nothing, optimizer states, gradients too, parameters too; None: as is faster.
        seconds: give the best plan so far when the search takes longer, with a bound that no plan is below.
        optimizer: what keeps states beside the parameters: an optimizer, a name such as "sgd_momentum", or a
            `ParameterState`; left out: AdamW, with states of the parameters' type.
        before: the plan that the job runs now, or the path of its file. Getting from there to the plan, which
            parameters and optimizer states travel for, then counts too, spread over `steps_ahead`.
        steps_ahead: how many steps there are left; with few of them the job stays as it is.

    Raises:
        CaptureError: the model cannot be captured.
        PlanError: no plan fits the memory of the devices, or the search lacks something, or a name is not known.
        ClusterError: a malformed cluster file.
    """
    choice = Choice.of(allow=allow, forbid=forbid, zero=zero, seconds=seconds)
    running = Plan.read(before) if isinstance(before, str | Path) else before
    program = CapturedProgram.of(_programs(model, loss_fn, row_dims), batch)
    costs = replace(program.costs(), state=optimizer_state_of(model.parameters(), optimizer))

    def find(planned: PlannedProgram, devices: Cluster, tell: Tell) -> Plan:
        made = planned.plan(devices, name, search, choice, before=running, steps_ahead=steps_ahead, tell=tell)
        options = PlanOptions.of_program(mixes_rows=planned.program.mixes_rows, name=name, choice=choice)
        return with_reasons(made, Problem(Profile(planned.costs), devices, options))

    if cluster is None:
        table = GroupTable()
        with telling("measuring devices and links"):
            planned, measured = program.at(from_first(table, costs)), Cluster.measure(table)
        with telling("planning") as tell:
            return broadcast_from_rank0(table, lambda: find(planned, measured, tell))
    devices = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    with telling("planning") as tell:
        return find(program.at(costs), devices, tell)


def profile(
    model: nn.Module,
    batch: Batch,
    *,
    more: Sequence[Batch] = (),
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: Asked = None,
    measured: Measuring | None = None,
    row_dims: AskedDims = None,
) -> Profile:
    """Return what a training step of `model` costs, counted from its captured graph; nothing is changed.

    Write it with `Profile.write` and plan from the file: `hetu-fx plan --profile p.json --cluster c.json`.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: an example of the whole batch of a step, of all devices together; its values are not read.
        more: batches with rows of other lengths, for searches that plan by length; each is captured.
        loss_fn: as for `auto_parallelize`.
        row_dims: as for `auto_parallelize`.
        optimizer: as for `plan`.
        measured: also run the model's blocks on the devices of `measured.cluster`, which are those of this job's
            processes (collective): the model is where this process computes. Left out, nothing is run.

    Raises:
        CaptureError: the model cannot be captured.
        ProfileError: two batches have rows of one length, or blocks cannot be measured.
    """
    check_shapes(model)
    state = optimizer_state_of(model.parameters(), optimizer)
    if measured is None:
        return _counted(model, (batch, *more), loss_fn, row_dims)[0].with_state(state)
    table, asked = GroupTable(), measured
    own = raise_on_all_ranks(table, lambda: _measured(model, (batch, *more), loss_fn, row_dims, asked, table.rank))
    found = all_gather_object(table, own)
    return merge_profiles([profile for profile in found if profile is not None]).with_state(state)


def measure(
    model: nn.Module,
    batch: Batch,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    seconds: float = SECONDS,
    row_dims: AskedDims = None,
) -> Cluster:
    """Return this job's devices and links, the devices as fast as they are on the model's own blocks; collective.

    Products of matrices alone, which `Cluster.measure` and `plan="auto"` begin with, do not tell what a model makes of
    a device. Give the result as `cluster=` to `plan` and `auto_parallelize`, or write it with `Cluster.write`.

    Args:
        model: where this process computes.
        batch: an example of the whole batch of a step, of all devices together; its values are not read.
        loss_fn: as for `auto_parallelize`.
        row_dims: as for `auto_parallelize`.
        seconds: how long blocks are run, by all devices at once, after a warm-up.

    Raises:
        CaptureError: the model cannot be captured.
        ProfileError: it has no repeated blocks, or they cannot be run apart.
    """
    table = GroupTable()
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def ready() -> OwnBlocks:
        program = CapturedProgram.of(_programs(model, loss_fn, row_dims), batch)
        return OwnBlocks.of(program, program.costs(memory=False), place, table.size)

    with telling("measuring devices and links"):
        blocks, cluster = raise_on_all_ranks(table, ready), Cluster.measure(table, device=str(place))
        return measure_on_blocks(blocks, cluster, table, seconds)


def _programs(model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None, row_dims: AskedDims) -> Programs:
    return Programs(model, loss_fn, row_dims=AskedRowDims(row_dims or {}))


def _counted(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_fn: Callable[..., torch.Tensor] | None,
    row_dims: AskedDims,
) -> tuple[Profile, Program]:
    """Return the profile from the programs of all batches, and the first of these."""
    programs = [CapturedProgram.of(_programs(model, loss_fn, row_dims), one) for one in batches]
    whole, *others = (program.profile() for program in programs)
    lengths = tuple((other.tokens_per_row, other.costs) for other in others)
    return replace(whole, other_lengths=lengths).with_rows(whole.costs.rows), programs[0].program


def _measured(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_fn: Callable[..., torch.Tensor] | None,
    row_dims: AskedDims,
    measuring: Measuring,
    rank: int,
) -> Profile | None:
    """Return the profile with the times of this rank's kind of device; None where another rank measures it."""
    if not measuring.measures(rank):
        return None
    counted, program = _counted(model, batches, loss_fn, row_dims)
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with telling("measuring blocks", speaker=rank == measuring.first) as tell:
        return with_times(counted, program, rank, measuring, place, tell)


def simulate(
    model: nn.Module,
    batch: Batch,
    plan: Plan | str | Path,
    cluster: Cluster | str | Path,
    *,
    schedule: Schedule | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    row_dims: AskedDims = None,
) -> Simulation:
    """Return what a training step would be: seconds, bubbles, bytes per link, memory over time, and a timeline of it.

    Nothing is run or changed. A notebook draws its `.timeline`, `hetu_fx.show.lanes.write_html` writes the same page,
    and `.timeline.write_chrome` a trace for Perfetto.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: an example of the whole batch of a step, of all devices together; its values are not read.
        plan: a plan, or the path of a plan file.
        cluster: the devices, with the rates at which they work now, or the path of a cluster file.
        schedule: in place of the plan's; interleaved in two chunks per stage.
        loss_fn: as for `auto_parallelize`.
        row_dims: as for `auto_parallelize`.

    Raises:
        CaptureError: the model cannot be captured.
        PlanError: the plan does not fit the model or the schedule, or is no plan file.
        ClusterError: a malformed cluster file, or one that lacks a device of the plan.
    """
    program = CapturedProgram.of(_programs(model, loss_fn, row_dims), batch)
    read = plan if isinstance(plan, Plan) else Plan.read(plan)
    devices = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
    if read.has_program and schedule is None:
        return program.at(program.costs(memory=False)).simulate(read, devices)
    asked = read if schedule is None else replace(read, schedule=schedule, chunks=0)
    return simulate_step(asked, program.costs(), devices)
