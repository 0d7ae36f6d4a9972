"""Plans: which devices run what part of the model on which share of the batch.

A `Plan` is pipelines side by side (data parallel replicas); a `Pipeline` is stages one after another; a
`Stage` is a group of devices that hold some of the model's repeated blocks, tensor parallel, context parallel
or both, in shards proportional to ratios. Plans are values: equal plans compare equal and can be dict keys. They need
no devices and no torch.

The plan file (`hetu_fx.plan/1`) is meant to be edited by hand; see `Plan.read`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from hetu_fx.base.documents import nearest
from hetu_fx.base.json_values import PAIRS
from hetu_fx.base.records import Document, Key, record
from hetu_fx.base.words import seconds_text
from hetu_fx.errors import PlanError
from hetu_fx.plans.parts import PartedPipeline
from hetu_fx.plans.picture import plan_html
from hetu_fx.plans.prediction import PREDICTION, Prediction
from hetu_fx.plans.stage import LATER, PIPELINES, Pipeline, Stage, check_devices, divide_by_gcd
from hetu_fx.plans.tables import (
    HEADER,
    busiest,
    device_rows,
    left_out_text,
    pipelines_text,
    plan_table,
    program_text,
    sentence,
    short_text,
)
from hetu_fx.show.markup import alone
from hetu_fx.show.table import table_text

__all__ = [
    "FORMAT",
    "SCHEDULES",
    "ZERO",
    "Pipeline",
    "Plan",
    "Schedule",
    "Stage",
    "micro_batch_rows",
    "pipeline_rows",
    "split_rows",
]

FORMAT = "hetu_fx.plan/1"

Schedule = Literal["1f1b", "gpipe", "zero-bubble", "interleaved"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
_CHUNKS = {"interleaved": 2, "zero-bubble": 1}  # at least, and where nothing is said; under others a stage is whole
Attention = Literal["auto", "gathered", "ring", "heads"]
ATTENTIONS: tuple[str, ...] = get_args(Attention)
ZERO: Mapping[int, str] = {
    0: "states whole on each replica",
    1: "optimizer states spread over them",
    2: "1, and gradients reduced as they come",
    3: "2, and parameters gathered unit by unit",
}
"""What each value of a plan's `zero` means."""


@dataclass(frozen=True, slots=True)
class Plan(Document):
    """Pipelines side by side (`pipelines`), and how they run.

    `name` is that of its variant; None: it gets one. `schedule` orders forwards and backwards of the micro-batches;
    under "interleaved" the blocks of every stage are dealt out in `chunks` (left out: 2), round by round over the
    stages of its pipeline, through which micro-batches thus go several times; "zero-bubble" may have chunks, too (left
    out: 1), others have 1. `zero` is one of `ZERO`: what replicas share instead of keeping it whole. A plan with
    `max_length` is a variant for batches whose longest sequence is at most that. `predicted` is what the planner
    expected; it takes no part in equality. Shares are kept without common factor. `split` names what tensor parallel
    groups split before what they would choose: pairs of a pattern of parameter names and a dim, such as
    ("*.experts.*", 0) for expert parallelism. With `sequence_parallel` they also share the sequence between them, in
    whatever cannot split what they split otherwise (Korthikanti et al., Reducing Activation Recomputation in Large
    Transformer Models, section 4.2.2). `attention` says how context parallel stages attend: to keys and values that are
    gathered, or that go round in a ring (Liu et al., Ring Attention with Blockwise Transformers) wherever they can;
    "auto" is by cost. `homes` is each rank's relative share of parameters and optimizer states, where these are spread,
    by rank (left out: as its speed); kept without common factor.
    """

    pipelines: tuple[Pipeline, ...]
    schedule: Schedule = "1f1b"
    zero: int = 1
    name: str | None = None
    max_length: int | None = None
    predicted: Prediction | None = field(default=None, compare=False)
    split: tuple[tuple[str, int], ...] = ()
    sequence_parallel: bool = False
    attention: Attention = "auto"
    chunks: int = 0
    homes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pipelines", tuple(self.pipelines))
        if not self.pipelines:
            raise PlanError("a plan has no pipelines\nhint: give at least one, such as {'stages': [{'devices': [0]}]}")
        shares = divide_by_gcd(tuple(pipeline.share for pipeline in self.pipelines))
        pairs = zip(self.pipelines, shares, strict=True)
        object.__setattr__(self, "pipelines", tuple(replace(p, share=share) for p, share in pairs))
        check_devices(self.devices, "a plan")
        self._check_schedule()
        if self.zero not in ZERO:
            known = ", ".join(f"{number} ({meaning})" for number, meaning in ZERO.items())
            raise PlanError(f"zero is {self.zero}\nhint: give {known}")
        self._check_homes()
        object.__setattr__(self, "split", tuple((pattern, dim) for pattern, dim in self.split))
        if any(type(dim) is not int or dim < 0 for _, dim in self.split):
            raise PlanError(f"split is {dict(self.split)}\nhint: give a dim from 0 for each pattern of parameter names")
        if type(self.sequence_parallel) is not bool:
            raise PlanError(f"sequence_parallel is {self.sequence_parallel!r}\nhint: give true or false")
        grid = next((stage for *_, stage in self.stages if stage.is_grid), None)
        if self.sequence_parallel and grid is not None:
            raise PlanError(
                f"sequence_parallel is true, but stage {grid} shares the sequence between tensor parallel groups "
                f"already\nhint: leave sequence_parallel out, or give that stage no context"
            )
        self._check_program()
        if self.attention not in ATTENTIONS:
            raise PlanError(f"unknown attention {self.attention!r}{nearest(self.attention, ATTENTIONS)}")
        if self.attention != "auto" and not any(stage.shares_sequence for *_, stage in self.stages):
            raise PlanError(
                f"attention is {self.attention!r}, but no stage shares the sequence\n"
                f"hint: give a stage a context, or leave attention out"
            )
        if self.max_length is not None and self.max_length < 1:
            raise PlanError(f"max_length is {self.max_length}\nhint: give 1 or more, or leave it out for any length")
        limits = [pipeline.max_length for pipeline in self.pipelines if pipeline.max_length is not None]
        if len(limits) == len(self.pipelines) and (self.max_length is None or self.max_length > max(limits)):
            raise PlanError(
                f"the plan's max_length is {self.max_length}, but its pipelines take sequences of up to {max(limits)}\n"
                f"hint: give a max_length of at most that"
            )

    def _check_schedule(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(f"unknown schedule {self.schedule!r}{nearest(self.schedule, SCHEDULES)}")
        least = _CHUNKS.get(self.schedule, 1)
        object.__setattr__(self, "chunks", self.chunks or least)
        if self.chunks < least or (self.chunks > 1 and self.schedule not in _CHUNKS):
            raise PlanError(
                f"the plan has chunks {self.chunks} and schedule {self.schedule!r}\n"
                f"hint: give 2 or more chunks under 'interleaved', any number under 'zero-bubble', none under others"
            )

    def _check_homes(self) -> None:
        homes = tuple(self.homes)
        if homes and (any(type(share) is not int or share < 0 for share in homes) or not sum(homes[: self._world])):
            raise PlanError(f"homes are {list(homes)}\nhint: give a whole number from 0 by rank, some above 0")
        if homes and len(homes) < self._world:
            raise PlanError(
                f"homes have shares of {len(homes)} ranks, but the plan uses device {self._world - 1}\n"
                f"hint: give one for each rank, 0 to {self._world - 1}"
            )
        if homes and not self.zero:
            raise PlanError(
                "homes share states out, but the plan has zero 0, which keeps them wherever they are read\n"
                "hint: use zero 1 to 3, or leave homes out"
            )
        object.__setattr__(self, "homes", divide_by_gcd(homes) if homes else ())

    @property
    def _world(self) -> int:
        return max(self.devices) + 1

    def _check_program(self) -> None:
        """Refuse a program beside what it would have to agree with."""
        if not self.has_program:
            return
        asked = {"several pipelines or stages": len(self.stages) > 1, "sequence_parallel": self.sequence_parallel}
        asked |= {"split": bool(self.split)}
        given = [name for name, is_given in asked.items() if is_given]
        if given:
            raise PlanError(
                f"a stage has a program, which cuts each op over all devices, but the plan has {' and '.join(given)}\n"
                f"hint: give one pipeline of one stage without them, or leave the program out"
            )

    @classmethod
    def single(cls, device: int = 0) -> Plan:
        """Build the plan that runs the whole model on one device."""
        return cls((Pipeline((Stage((device,)),)),))

    @classmethod
    def data_parallel(cls, devices: int | Sequence[int], shares: Sequence[int] = (), *, zero: int = 1) -> Plan:
        """Build a plan with the whole model on each device, each with its share of the rows.

        `devices` are ranks, or how many of them; `zero` is one of `ZERO`.
        """
        devices = _ranks(devices)
        shares = tuple(shares) or (1,) * len(devices)
        if len(shares) != len(devices):
            raise PlanError(
                f"{len(shares)} shares {list(shares)} for devices {list(devices)}\nhint: give one per device"
            )
        pairs = zip(devices, shares, strict=True)
        return cls(tuple(Pipeline((Stage((d,)),), share=s) for d, s in pairs), zero=zero)

    @classmethod
    def tensor_parallel(cls, devices: int | Sequence[int], ratios: Sequence[int] = ()) -> Plan:
        """Build a plan with one tensor parallel group over all devices (ratios left out: even)."""
        return cls((Pipeline((Stage(_ranks(devices), tuple(ratios)),)),))

    @classmethod
    def context_parallel(cls, devices: int | Sequence[int], ratios: Sequence[int] = ()) -> Plan:
        """Build a plan with one group over all devices that shares the sequence (ratios left out: even)."""
        ranks = _ranks(devices)
        return cls((Pipeline((Stage(ranks, tuple(ratios), context=len(ranks)),)),))

    @property
    def devices(self) -> tuple[int, ...]:
        """Return the ranks of all pipelines, in order."""
        return tuple(device for pipeline in self.pipelines for device in pipeline.devices)

    @property
    def stages(self) -> tuple[tuple[int, int, Stage], ...]:
        """Return `(pipeline index, stage index, stage)` of all stages, in order."""
        return tuple((i, j, s) for i, pipe in enumerate(self.pipelines) for j, s in enumerate(pipe.stages))

    @property
    def recomputes(self) -> bool:
        """Tell whether any stage does forwards again in the backward."""
        return any(stage.recompute for *_, stage in self.stages)

    @property
    def is_data_parallel(self) -> bool:
        """Tell whether each pipeline is one device that runs the whole model, on all of its rows at once."""
        return all(len(pipeline.devices) == 1 and pipeline.micro_batches == 1 for pipeline in self.pipelines)

    def home_weights(self, speeds: Mapping[int, float]) -> Mapping[int, float]:
        """Return what states are shared out by: the plan's own shares of homes, or else the speeds of ranks."""
        return dict(enumerate(map(float, self.homes))) if self.homes else speeds

    @property
    def gathers_units(self) -> bool:
        """Tell whether parameters are gathered unit by unit: zero 3, where each pipeline is one pass of one stage."""
        return self.zero == 3 and all(len(p.stages) == 1 and p.micro_batches == 1 for p in self.pipelines)

    @property
    def lets_gradients_go(self) -> bool:
        """Tell whether gradients that are on their way are waited for while others come, from zero 2 on.

        Not where devices of a pipeline wait for each other in backward: some would wait for others that wait for them.
        """
        return self.zero >= 2 and all(len(pipeline.devices) == 1 for pipeline in self.pipelines)

    @property
    def zero_in_effect(self) -> int:
        """Return the `zero` of which a step has all memory that it saves: less than 2 and 3 where these keep more."""
        if self.gathers_units:
            return 3
        return 2 if self.lets_gradients_go and self.is_data_parallel else min(self.zero, 1)

    @property
    def has_program(self) -> bool:
        """Tell whether a stage says op by op what is cut."""
        return any(stage.program for *_, stage in self.stages)

    def place(self, device: int) -> tuple[int, int] | None:
        """Return the (pipeline index, stage index) of a rank, or None when the plan leaves it idle."""
        return next(((i, j) for i, j, stage in self.stages if device in stage.devices), None)

    def check(self, *, num_blocks: int, world_size: int) -> None:
        """Raise `PlanError` unless the plan fits a model of `num_blocks` repeated blocks and this world."""
        outside = sorted(device for device in self.devices if device >= world_size)
        if outside:
            raise PlanError(
                f"plan{self._called} is for another world: it uses devices {outside}, but there are only "
                f"{world_size} (0 to {world_size - 1})\nhint: start more processes, or plan again for this world"
            )
        for index, pipeline in enumerate(self.pipelines):
            try:
                PartedPipeline.of(pipeline, num_blocks, self.chunks)
            except PlanError as problem:
                raise PlanError(f"plan{self._called}, pipelines[{index}]: {problem}") from None

    def with_blocks(self, num_blocks: int) -> Plan:
        """Return the same plan with every stage's number of blocks written out."""
        written = tuple(_written_out(pipeline, num_blocks) for pipeline in self.pipelines)
        return self if written == self.pipelines else replace(self, pipelines=written)

    def parts(self, num_blocks: int) -> tuple[PartedPipeline, ...]:
        """Return the pipelines with what their micro-batches go through: a part for each chunk of each stage.

        Raises `PlanError` where blocks do not add up to `num_blocks`, and for a stage of fewer blocks than chunks.
        """
        return tuple(PartedPipeline.of(pipeline, num_blocks, self.chunks) for pipeline in self.pipelines)

    @property
    def schedule_text(self) -> str:
        """Return the schedule, with its chunks where there are several: `interleaved in 2 chunks`."""
        return self.schedule if self.chunks == 1 else f"{self.schedule} in {self.chunks} chunks"

    @property
    def _called(self) -> str:
        return "" if self.name is None else f" {self.name!r}"

    def summary(self) -> str:
        """Return the plan on one line: `3 rows in 2: [0,1 2:1]x3 > [2]x1 | 1 row: [3]x4`."""
        return pipelines_text(self.pipelines)

    def __repr__(self) -> str:
        step = "" if self.predicted is None else f"; predicted step {seconds_text(self.predicted.seconds)}"
        return f"<Plan{self._called}: {short_text(self.pipelines)}{step}>"

    @property
    def _how(self) -> str:
        length = "any" if self.max_length is None else f"at most {self.max_length}"
        shared = ", sequence parallel" if self.sequence_parallel else ""
        shared += "" if self.attention == "auto" else f", {self.attention} attention"
        kept = " (parameters for the whole step)" if self.zero == 3 and not self.gathers_units else ""
        kept += f", homes {':'.join(map(str, self.homes))}" if self.homes else ""
        head = f"plan{self._called}: schedule {self.schedule_text}, zero {self.zero}{kept}"
        return f"{head}, sequence length {length}{shared}"

    def __str__(self) -> str:
        return "\n".join([self._how, plan_table(self.pipelines), *program_text(self.pipelines)])

    def explain(self, devices: Iterable[int] = ()) -> str:
        """Return who computes what in a sentence and as a table, what was predicted, and why the planner chose it.

        Which of the devices that there are it leaves out is said too: of `devices`, and of those planned for.
        """
        own, told = (self.pipelines, self.predicted), tuple(devices)
        head = [sentence(*own, told), plan_table(self.pipelines), *program_text(self.pipelines)]
        head += left_out_text(*own, told)
        if self.predicted is None:
            return "\n".join([*head, "no prediction: the plan was given, not made by the planner", self._how])
        rows = list(device_rows(*own))
        table = [table_text(HEADER, rows)] if rows else []
        return "\n".join([*head, *table, self.predicted.text(busiest(*own)), self._how])

    def html(self) -> str:
        """Return who has which share of the work, as a table with bars for a page."""
        length = "" if self.max_length is None else f", sequences of at most {self.max_length}"
        step = "" if self.predicted is None else f": predicted step {seconds_text(self.predicted.seconds)}"
        title = f"plan{self._called}{step}; schedule {self.schedule_text}, zero {self.zero}{length}"
        return plan_html(title, self.pipelines, self.predicted)

    def _repr_html_(self) -> str:
        """Return what notebooks show: `html`, as a page of its own."""
        return alone(self.html())


def _ranks(devices: int | Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that are given, or as many as are asked for."""
    if isinstance(devices, int) and devices < 1:
        raise PlanError(f"a plan for {devices} devices was asked for\nhint: give 1 or more, or their ranks")
    return tuple(range(devices)) if isinstance(devices, int) else tuple(devices)


PLAN_WORDS = ("data", "tensor", "pipeline")
"""Plans for all ranks that have a name."""


def plan_in_word(word: str, ranks: int, num_blocks: int = 0) -> Plan:
    """Return the plan of a name for so many ranks.

    Args:
        word: one of `PLAN_WORDS`: equal replicas, one tensor parallel group, or the stages of a pipeline, which has
            two micro-batches for each stage.
        ranks: how many there are.
        num_blocks: of the model, which the stages of a pipeline share; 0: it has none, or they are not known.

    Raises:
        PlanError: a pipeline of more stages than the model has blocks.
    """
    if word == "data":
        return Plan.data_parallel(ranks)
    if word == "tensor":
        return Plan.tensor_parallel(ranks)
    if 0 < num_blocks < ranks:
        raise PlanError(
            f"plan='pipeline' has a stage on each of {ranks} ranks, but the model has {num_blocks} blocks\nhint: use "
            f"'data' or 'tensor', or fewer ranks"
        )
    return Plan(
        (Pipeline(tuple(Stage((rank,)) for rank in range(ranks)), micro_batches=2 * ranks if ranks > 1 else 1),)
    )


def split_rows(total: int, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the rows of each micro-batch of each pipeline; they add up to `total`, some may be 0."""
    shares = zip(pipeline_rows(total, plan), plan.pipelines, strict=True)
    return tuple(micro_batch_rows(rows, pipeline.micro_batches) for rows, pipeline in shares)


def pipeline_rows(total: int, plan: Plan) -> tuple[int, ...]:
    """Return how many of `total` rows each pipeline gets, in proportion to `share`, by largest remainder.

    They add up to `total`; equal remainders go to the earlier pipeline; some may get none.
    """
    shares = [pipeline.share for pipeline in plan.pipelines]
    parts = sum(shares)
    whole = [total * share // parts for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (-(total * shares[i] % parts), i))
    for index in order[: total - sum(whole)]:
        whole[index] += 1
    return tuple(whole)


def micro_batch_rows(rows: int, micro_batches: int) -> tuple[int, ...]:
    """Return the rows of each micro-batch of a pipeline, larger ones first, none differing by more than 1."""
    small, more = divmod(rows, micro_batches)
    return tuple(small + (i < more) for i in range(micro_batches))


def _written_out(pipeline: Pipeline, num_blocks: int) -> Pipeline:
    pairs = list(zip(pipeline.stages, pipeline.blocks(num_blocks), strict=True))
    if all(stage.blocks == count for stage, count in pairs):
        return pipeline  # asked of thousands of stages again and again
    return replace(pipeline, stages=tuple(replace(stage, blocks=count) for stage, count in pairs))


Plan.form = record(
    Plan,
    PlanError,
    order="name pipelines schedule chunks zero homes max_length split sequence_parallel attention predicted",
    format=FORMAT,
    later=LATER,
    pipelines=Key(PIPELINES),
    schedule=Key(written="always"),
    chunks=Key(omit=lambda chunks: chunks == 1),
    zero=Key(written="always"),
    split=Key(PAIRS),
    predicted=Key(PREDICTION),
)
