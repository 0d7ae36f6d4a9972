"""What a caller asks of a search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hetu_fx.base.checks import check_positive
from hetu_fx.base.documents import nearest
from hetu_fx.base.low_dtypes import STAGE_DTYPES
from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import ZERO, Plan, Schedule


@dataclass(frozen=True, slots=True)
class Feature:
    """What plans may do.

    Attributes:
        told: what it is, in a line.
        is_used: tells whether a plan does it.
        option: the field of `PlanOptions` that switches it; empty: there is none, plans may do it unless forbidden.
    """

    told: str
    is_used: Callable[[Plan], bool]
    option: str = ""


def _computes_in(dtype: str, plan: Plan) -> bool:
    return any(stage.dtype == dtype for pipeline in plan.pipelines for stage in pipeline.stages)


def _is_uneven(plan: Plan) -> bool:
    """Tell whether pipelines, shards or stages are unlike; stages whose blocks do not divide differ by one at most."""
    shapes = {(one.share, one.micro_batches, *(len(stage.devices) for stage in one.stages)) for one in plan.pipelines}
    ratios = [given for *_, stage in plan.stages for given in (stage.ratios, stage.context_ratios)]
    blocks = ([stage.blocks or 0 for stage in pipeline.stages] for pipeline in plan.pipelines)
    return len(shapes) > 1 or any(len(set(own)) > 1 for own in ratios) or any(max(own) - min(own) > 1 for own in blocks)


FEATURES: Mapping[str, Feature] = {
    "data_parallel": Feature("several pipelines, each with its rows", lambda plan: len(plan.pipelines) > 1),
    "tensor_parallel": Feature(
        "groups that split weights",
        lambda plan: any(len(stage.devices) > stage.context for *_, stage in plan.stages),
        "tensor_parallel",
    ),
    "pipeline": Feature(
        "stages one after another", lambda plan: any(len(one.stages) > 1 for one in plan.pipelines), "pipelines"
    ),
    "context": Feature(
        "groups that share the sequence",
        lambda plan: any(stage.shares_sequence for *_, stage in plan.stages),
        "context_parallel",
    ),
    "sequence_parallel": Feature(
        "tensor parallel groups that share the sequence too", lambda plan: plan.sequence_parallel, "sequence_parallel"
    ),
    "experts": Feature("experts, rather than their width, spread over groups", lambda plan: bool(plan.split)),
    "program": Feature("a program of the group, op by op", lambda plan: plan.has_program, "programs"),
    "recompute": Feature(
        "blocks whose forward is done again in backward",
        lambda plan: plan.recomputes,
        "recompute",
    ),
    "zero": Feature("optimizer states spread over replicas", lambda plan: plan.zero > 0, "zero"),
    "whole_states": Feature(
        "optimizer states whole on each replica",
        lambda plan: plan.zero == 0 and (len(plan.pipelines) > 1 or plan.has_program),
    ),
    "whole_gradients": Feature("gradients whole on each replica until all are there", lambda plan: plan.zero == 1),
    "zero_2": Feature("gradients reduced as they come", lambda plan: plan.zero == 2),
    "zero_3": Feature("parameters gathered unit by unit", lambda plan: plan.zero == 3),
    **{
        dtype: Feature(f"stages that compute in {dtype}, where that is faster", partial(_computes_in, dtype), dtype)
        for dtype in STAGE_DTYPES
    },
    "zero_bubble": Feature(
        "gradients of weights made where a stage would wait", lambda plan: plan.schedule == "zero-bubble"
    ),
    "interleaved": Feature("stages in chunks, which micro-batches pass in rounds", lambda plan: plan.chunks > 1),
    "uneven": Feature("rows, shards or stages of different sizes", _is_uneven),
}
"""What users may allow and forbid, by name."""

_OF_ZERO = ("whole_states", "whole_gradients", "zero_2", "zero_3")
"""Which of these plans of each `zero` have."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user says of plans.

    Attributes:
        allow, forbid: names of `FEATURES` to switch on and off; the others stay as the options have them.
        zero: 0 to 3, as a plan must have it; None: as is faster.
        seconds: after which a search gives the best plan so far; None: it goes to its end.
    """

    allow: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    zero: int | None = None
    seconds: float | None = None

    @classmethod
    def of(
        cls,
        *,
        allow: str | Sequence[str] = (),
        forbid: str | Sequence[str] = (),
        zero: int | None = None,
        seconds: float | None = None,
    ) -> Choice:
        """Return the choice; one name may stand for a list of it."""
        return cls(_names(allow), _names(forbid), zero, seconds)

    def __post_init__(self) -> None:
        for name in (*self.allow, *self.forbid):
            if name not in FEATURES:
                raise PlanError(f"plans have no feature {name!r} to allow or forbid{nearest(name, tuple(FEATURES))}")
        both = sorted(set(self.allow) & set(self.forbid))
        if both:
            raise PlanError(f"{', '.join(both)} is both allowed and forbidden\nhint: name it once")
        if self.zero is not None and self.zero not in ZERO:
            known = ", ".join(f"{number} ({meaning})" for number, meaning in ZERO.items())
            raise PlanError(f"zero is {self.zero}\nhint: give {known}")
        if self.zero and "zero" in self.forbid:
            raise PlanError(f"zero is {self.zero}, but zero is forbidden\nhint: give one of them")
        if self.zero == 0 and "zero" in self.allow:
            raise PlanError("zero is 0, but zero is allowed\nhint: give one of them")


ANY = Choice()
"""Of whom nothing is asked."""


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the planner may do.

    micro_batches are the counts to choose from; memory_fraction how much of a device's memory a plan may
    fill; tensor_parallel, pipelines and context_parallel may be switched off (a model that mixes rows cannot be cut
    into micro-batches: give micro_batches=(1,)). sequence_parallel lets tensor parallel groups share the sequence where
    that is predicted to be faster or memory asks for it (True), only where memory asks for it (None, as what gloo takes
    for it is not priced yet), or never. With recompute, stages recompute as few of their blocks as they must to fit
    memory. Programs are looked for where a model has no repeated blocks (None, as what they take in others is not
    measured yet), in any model (True), or never. With bfloat16, stages compute in it where the cluster says that
    it is faster, which changes numbers. name and max_length are put on the plan. forbidden are names of
    `FEATURES` that no option switches; seconds, after which a search gives its best so far, take no part in what the
    best plan is.
    """

    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    schedule: Schedule = "1f1b"
    zero: int = 1
    memory_fraction: float = 0.9
    tensor_parallel: bool = True
    pipelines: bool = True
    sequence_parallel: bool | None = None
    context_parallel: bool = True
    recompute: bool = True
    programs: bool | None = None
    bfloat16: bool = False
    name: str | None = None
    max_length: int | None = None
    forbidden: tuple[str, ...] = ()
    seconds: float | None = None

    @classmethod
    def of_program(cls, *, mixes_rows: bool, name: str | None = None, choice: Choice = ANY) -> PlanOptions:
        """Return the options for a program; one in which rows meet is not cut into micro-batches or stages."""
        chosen = cls(name=name).chosen(choice)
        if not mixes_rows:
            return chosen
        if "pipeline" in choice.allow:
            raise PlanError(
                "pipeline is allowed, but rows meet in the model (BatchNorm), which is not cut into stages\n"
                "hint: leave pipeline out"
            )
        return replace(chosen, micro_batches=(1,), pipelines=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batches", tuple(sorted(set(self.micro_batches))))
        if not self.micro_batches or self.micro_batches[0] < 1:
            raise PlanError(f"micro_batches to choose from are {self.micro_batches}\nhint: give numbers from 1")
        if not 0 < self.memory_fraction <= 1:
            raise PlanError(f"memory_fraction is {self.memory_fraction}\nhint: give a number above 0, up to 1")
        if self.zero not in (0, 1):
            raise PlanError(
                f"options have zero {self.zero}\nhint: give 0 or 1, and forbid what plans must not have of "
                f"{', '.join(_OF_ZERO)}"
            )
        if self.schedule == "interleaved":
            raise PlanError(
                "the schedule to search under is 'interleaved', but searches go through whole stages\n"
                "hint: leave it out (the best pipelines are tried in chunks, too)"
            )
        if self.seconds is not None:
            check_positive(PlanError, "search", seconds=self.seconds)

    def chosen(self, choice: Choice) -> PlanOptions:
        """Return the options with what a user has chosen."""
        wanted = dict.fromkeys(choice.allow, True) | dict.fromkeys(choice.forbid, False)
        switched = {option: own for name, own in wanted.items() if (option := FEATURES[name].option)}
        values: dict[str, Any] = {option: int(own) if option == "zero" else own for option, own in switched.items()}
        spread = (name for zero, name in enumerate(_OF_ZERO) if choice.zero and zero != choice.zero)
        unswitched = {name for name in (*self.forbidden, *choice.forbid, *spread) if not FEATURES[name].option}
        zero = values.pop("zero", self.zero) if choice.zero is None else min(choice.zero, 1)
        return replace(
            self,
            **values | {"zero": zero},
            forbidden=tuple(sorted(unswitched - set(choice.allow))),
            seconds=choice.seconds,
        )

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the low dtypes that stages may compute in."""
        return tuple(dtype for dtype in STAGE_DTYPES if getattr(self, dtype))

    @property
    def off(self) -> tuple[str, ...]:
        """Return the features that plans must not have."""
        return tuple(name for name, feature in FEATURES.items() if not self._allows(name, feature))

    def _allows(self, name: str, feature: Feature) -> bool:
        return getattr(self, feature.option) not in (False, 0) if feature.option else name not in self.forbidden

    def refused(self, plan: Plan) -> tuple[str, ...]:
        """Return the features that a plan has and must not have."""
        return tuple(name for name in self.off if FEATURES[name].is_used(plan))

    def allowed(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """Yield those of some plans that have none of the features that they must not have."""
        return (plan for plan in plans if not self.refused(plan))


class TimeLimit:
    """A moment after which searches give what they have found.

    `cut` tells whether a search did: only then might its answer be another one with more time.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without seconds it never comes."""
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds
        self.cut = False

    def ends(self, has_found: object) -> bool:
        """Tell a search that could go on whether to stop: never before it has found something."""
        if not has_found or self._clock() < self._end:
            return False
        self.cut = True
        return True
