"""A batch of sequences as micro-batches of the pipelines of a variant, and what may be asked of one.

Seconds are those of Hydraulis' cost model (`strategy`): attention is paid for each run of tokens that attend to each
other, a s^2 + b s for one of s tokens. These are the sequences of a row, and what fills it; where a model's attention
cannot be told apart by sequences, whole rows. A pipeline of p stages takes sum_j T_j + (p - 1) max_j T_j for its
micro-batches, which is (3) of the model where they are alike.

The same model, fitted to the costs of a plan's stages, makes a plan a variant that may run a batch, and tells what
each device has to compute for an assignment, so that its rate can be told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.dispatch.scheme_costs import Scheme, TimeFit, fit_times
from hetu_fx.planner.price.stage_seconds import stage_costs
from hetu_fx.planner.price.step import PricedStep
from hetu_fx.planner.values.line import Line
from hetu_fx.planner.values.program import ProgramCosts, length_weights
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.plan import Plan

Rows = tuple[tuple[int, ...], ...]

ANY_LENGTH = 1 << 40
"""The `max_length` of a scheme of which nobody said what it holds."""


class Batching(StrEnum):
    """How a batch becomes micro-batches.

    PADDED: every sequence is a row as long as the batch's longest; rows are shared out by the plan's shares.
    IN_ORDER: rows of one length hold sequences as they come; shared out by shares.
    GREEDY: as IN_ORDER, but each sequence goes where the least room is left, longest first.
    DISPATCHED: sequences are dispatched to pipelines by time, and packed there as in GREEDY, in rows as long as needed.
    PACKED: dispatched and packed by time, as Hydraulis does, in rows of their own widths.
    WHOLE_ROWS: as PACKED, by what rows would take if attention were paid for all pairs of their tokens, as it is where
        a model's attention cannot be told apart by sequences.
    ALIKE: dispatched by time; a micro-batch has sequences of one length, rounded up, a row each. For models that
        cannot keep the sequences of a row apart.
    """

    PADDED = "padded"
    IN_ORDER = "in order"
    GREEDY = "greedy"
    DISPATCHED = "dispatched"
    PACKED = "packed"
    WHOLE_ROWS = "whole rows"
    ALIKE = "alike"


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Rows of one width, each the positions in the batch of the sequences that it holds.

    Attention is paid for each of `runs`, in tokens; left out: for whole rows.
    """

    rows: Rows
    width: int
    runs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "runs", self.runs or (self.width,) * len(self.rows))


@dataclass(frozen=True, slots=True)
class EligibleVariant:
    """A variant that may run a batch: its plan, the scheme of each of its pipelines, and what a step takes besides.

    A scheme's `max_length` is what a micro-batch may have, in tokens.
    """

    name: str
    plan: Plan
    schemes: tuple[Scheme, ...]
    step_seconds: float = 0.0

    @property
    def max_length(self) -> int:
        """Return the longest sequence that some pipeline takes."""
        return max(scheme.max_length for scheme in self.schemes)

    def with_rows_of(self, tokens: int) -> EligibleVariant:
        """Return the candidate with micro-batches of at most so many tokens."""
        return replace(self, schemes=tuple(replace(s, max_length=min(s.max_length, tokens)) for s in self.schemes))


@dataclass(frozen=True, slots=True)
class Assignment:
    """What each pipeline of a variant runs, heaviest micro-batch first, and how long that is expected to take."""

    variant: str
    pipelines: tuple[tuple[PackedMicroBatch, ...], ...]
    seconds: float

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the positions of all sequences, in the order in which they are placed."""
        return tuple(i for micro in self.micro_batches for row in micro.rows for i in row)

    @property
    def micro_batches(self) -> tuple[PackedMicroBatch, ...]:
        """Return the micro-batches of all pipelines, one pipeline after another."""
        return tuple(micro for pipeline in self.pipelines for micro in pipeline)


@dataclass(frozen=True, slots=True)
class Request:
    """A batch to be assigned.

    Attributes:
        lengths: tokens of its sequences.
        batching: how it becomes micro-batches.
        multiple: rows have a multiple of so many tokens.
        tokens: of a micro-batch at most, on a pipeline that holds `ANY_LENGTH`; None: as of the longest sequence.
        whole_rows: whether attention is paid for all pairs of a row's tokens, instead of those of its sequences.
        seed: of the searches.
    """

    lengths: tuple[int, ...]
    batching: Batching = Batching.PACKED
    multiple: int = 1
    tokens: int | None = None
    whole_rows: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise PlanError(f"rows cannot have a multiple of {self.multiple} tokens\nhint: give 1 or more")

    def width(self, tokens: int) -> int:
        """Return the width of a row for so many tokens."""
        return tokens + -tokens % self.multiple

    @property
    def longest(self) -> int:
        """Return the width that the longest sequence needs."""
        return self.width(max(self.lengths))

    def micro_batch(self, rows: Rows, width: int) -> PackedMicroBatch:
        """Return rows of some sequences as a micro-batch, what fills them up being a run of its own."""
        if self.whole_rows:
            return PackedMicroBatch(rows, width)
        fills = (width - sum(self.lengths[i] for i in row) for row in rows)
        return PackedMicroBatch(rows, width, (*(self.lengths[i] for row in rows for i in row), *filter(None, fills)))


def pipeline_seconds(scheme: Scheme, micro_batches: Sequence[PackedMicroBatch]) -> float:
    """Return what a pipeline takes for its micro-batches."""
    return scheme.done([scheme.times.micro_batch_seconds(micro.runs) for micro in micro_batches])


def make_candidate(name: str, plan: Plan, by_length: Mapping[int, ProgramCosts], cluster: Cluster) -> EligibleVariant:
    """Return a plan as what may run a batch.

    Args:
        name: of the variant.
        plan: the plan.
        by_length: what a row costs, at three lengths at least.
        cluster: the devices.

    What a step takes besides the batch is what it takes on hosts, gradient sync, gather and optimizer, as the cost
    model has them.

    A pipeline's micro-batch holds its `max_length`, or the plan's; what has neither holds any number of tokens.
    """
    some = next(iter(by_length.values()))
    written = plan.with_blocks(some.num_blocks)
    schemes = tuple(_scheme(one, plan.max_length, by_length, cluster) for one in written.parts(some.num_blocks))
    priced = PricedStep(written, some, cluster)
    return EligibleVariant(name, plan, schemes, priced.host_seconds + priced.end_seconds)


def _scheme(
    pipeline: PartedPipeline, max_length: int | None, by_length: Mapping[int, ProgramCosts], cluster: Cluster
) -> Scheme:
    own, deal = pipeline.pipeline, pipeline.deal
    held = own.max_length or max_length or ANY_LENGTH
    times = fit_pipeline_times(pipeline, by_length, cluster)
    return Scheme(len(own.stages[0].devices), deal.num_stages, times, held, chunks=deal.chunks)


def fit_pipeline_times(pipeline: PartedPipeline, by_length: Mapping[int, ProgramCosts], cluster: Cluster) -> TimeFit:
    """Fit the seconds that the slowest stage takes for a row of each length; `fixed` is what a micro-batch costs.

    Parts of one stage count together.
    """
    stages = {length: _stage_lines(pipeline, costs, cluster) for length, costs in by_length.items()}
    fit = fit_times([(length, max(line.slope for line in found)) for length, found in stages.items()]).fit
    fixed = max(line.fixed for found in stages.values() for line in found)
    return replace(fit, c=fit.c + fixed)


def _stage_lines(pipeline: PartedPipeline, costs: ProgramCosts, cluster: Cluster) -> Sequence[Line]:
    found = [Line()] * pipeline.deal.num_stages
    for number, part in enumerate(stage_costs(pipeline, costs, cluster)):
        found[pipeline.deal.stage(number)] += part.seconds
    return found


def device_seconds(
    assignment: Assignment, plan: Plan, by_length: Mapping[int, ProgramCosts], cluster: Cluster
) -> dict[int, float]:
    """Return the compute seconds, by rank, that an assignment is expected to take on healthy devices.

    Every step asks, so that stages are priced for lengths that are known, and others added up of these.

    Args:
        assignment: which micro-batch of which pipeline has which sequences.
        plan: that it is for.
        by_length: what a row costs, at three lengths at least.
        cluster: the devices.
    """
    some = next(iter(by_length.values()))
    written = plan.with_blocks(some.num_blocks)
    seconds: dict[int, float] = defaultdict(float)
    for pipeline, micro_batches in zip(written.parts(some.num_blocks), assignment.pipelines, strict=True):
        runs = Counter(run for micro in micro_batches for run in micro.runs)
        for length, count in _rows_of_known(by_length, runs).items():
            for device, line in _compute_lines(pipeline, by_length[length], cluster):
                seconds[device] += line.slope * count
        for device, line in _compute_lines(pipeline, some, cluster) if micro_batches else ():
            seconds[device] += line.fixed * len(micro_batches)  # whatever the length is
    return dict(seconds)


def _rows_of_known(known: Collection[int], runs: Mapping[int, int]) -> dict[int, float]:
    """Return how many rows of each known length take as long as rows of others do, which are counted by length."""
    found: dict[int, float] = defaultdict(float)
    for run, count in runs.items():
        for length, weight in length_weights(known, run).items():
            found[length] += weight * count
    return found


def _compute_lines(pipeline: PartedPipeline, costs: ProgramCosts, cluster: Cluster) -> Iterator[tuple[int, Line]]:
    for stage in stage_costs(pipeline, costs, cluster):
        yield from zip(stage.stage.devices, stage.compute, strict=True)


Assignments = tuple[Assignment, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A plan for a batch.

    Attributes:
        assignments: the parts that run one after another.
        seconds: what they are expected to take together.
        planning_seconds: what making the plan took, wherever that was.
        waited_seconds: how long the step waited for it.
    """

    assignments: Assignments
    seconds: float
    planning_seconds: float
    waited_seconds: float
