"""Find the fastest plan: program, cluster, space, cost and search meet here.

The result is a function of the arguments alone, so every rank that has them finds the same plan, and plans that have
been made are kept by content: the same question is not searched twice. A file holds the answer to one question. Its
name is a digest of all that the answer depends on: profile, cluster, options, the plan before, the captured graph, the
search, and the code of the planner itself. Files are written atomically, and checked when they are read: one that is
torn or of another question is made anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import hetu_fx.comm_ops
import hetu_fx.planner
from hetu_fx.base.documents import cache_folder, sources_digest
from hetu_fx.base.json_values import many
from hetu_fx.base.progress import Tell, nobody
from hetu_fx.base.records import Document, Key, record
from hetu_fx.base.words import bytes_text, ranks_text
from hetu_fx.cluster.chips import chip_text
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError
from hetu_fx.planner.price.fitting import fit_recompute
from hetu_fx.planner.price.placement import device_bytes, homes_by_memory
from hetu_fx.planner.price.step import bound_seconds, memory_problems
from hetu_fx.planner.search.problem import (
    WORTH,
    Candidates,
    CapturedCosts,
    Problem,
    Search,
    predict_by_costs,
    seconds_by_costs,
)
from hetu_fx.planner.search.staying import with_moves
from hetu_fx.planner.searches import DEFAULT, find_search
from hetu_fx.planner.simulate.simulate import num_jobs
from hetu_fx.planner.values.options import PlanOptions, TimeLimit
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Schedule, Stage
from hetu_fx.plans.prediction import Prediction
from hetu_fx.plans.tables import short_text

NEGLIGIBLE = 0.01
"""A plan slower by less than this is as good: predictions are not that exact."""

MOST_JOBS = 80_000
"""So many jobs of finalists are simulated for each `JOBS_DEVICES` devices: about two seconds."""

JOBS_DEVICES = 64

ROOM = 4_000
"""So many of them are left for plans that take few."""

LEAST_FINALISTS = 8
MOST_TWINS = 4
"""So many finalists are tried under other schedules too."""

IN_CHUNKS: tuple[Schedule, ...] = ("interleaved", "zero-bubble")
"""What they are tried under where stages are dealt out in chunks."""

MOST_CHUNKS = 4
"""Their stages are dealt out in 2 chunks, and in so many or as many as they have blocks for."""

__all__ = ["PlanOptions", "make_plan", "make_plans", "with_prediction"]


def make_plan(
    costs: ProgramCosts | Profile,
    cluster: Cluster,
    *,
    options: PlanOptions | None = None,
    search: str = DEFAULT,
    captured: CapturedCosts | None = None,
    before: Plan | None = None,
    steps_ahead: float = math.inf,
    tell: Tell = nobody,
) -> Plan:
    """Return the plan of least predicted seconds that fits memory, with its prediction and the runner-up.

    For a job that runs `before`, getting from there to the plan counts too, spread over `steps_ahead`.

    Raises `PlanError` when no plan fits, with what the one that needs least lacks, and for a search whose answer is
    a plan for each length of sequences (see `make_plans`).
    """
    profile = costs if isinstance(costs, Profile) else Profile(costs)
    problem = Problem(profile, cluster, options or PlanOptions(), before, steps_ahead, captured, tell)
    plans = make_plans(problem, search)
    if len(plans) > 1:
        lengths = [plan.max_length for plan in plans]
        raise PlanError(
            f"search {search!r} finds a plan for each longest sequence {lengths}\nhint: ask make_plans for them"
        )
    return plans[0]


def make_plans(problem: Problem, search: str = DEFAULT) -> tuple[Plan, ...]:
    """Return the best plan for each `max_length` that the search plans for, shorter ones first; most plan for one.

    Raises `PlanError` when no plan fits, or the problem lacks what the search needs, with a hint.
    """
    chosen = find_search(search)
    lacking = chosen.lacks(problem)
    if lacking:
        raise PlanError(f"search {search!r} cannot be used here: {lacking}")
    if dtypes := problem.options.dtypes:
        return _in_dtypes(problem, search, dtypes)
    problem = replace(problem, time_limit=TimeLimit(problem.options.seconds))
    found = _allowed(chosen.find(problem), problem) or _allowed(chosen.find(problem.thinner), problem)
    if not found:
        raise PlanError(_nothing_fits(problem, chosen))
    found = _moved(found, problem)
    lengths = sorted({plan.max_length for plan in found}, key=lambda length: (length is None, length))
    return tuple(_best(chosen, problem, _of_length(found, length)) for length in lengths)


def _in_dtypes(problem: Problem, search: str, dtypes: Sequence[str]) -> tuple[Plan, ...]:
    """Return the best plans where stages may compute in low dtypes.

    Which dtype is best for a kind of devices depends on nothing else in a plan, so the search goes through the cluster
    as fast as it is in these. What unlike kinds in one stage have in common may be slower, which the price says then.
    """
    off: dict[str, Any] = dict.fromkeys(dtypes, False)
    forbidden = (*problem.options.forbidden, "zero_3")  # casts of all parameters would stay for backward
    options = replace(problem.options, **off, forbidden=forbidden)
    quick = replace(problem, cluster=problem.cluster.in_dtypes(dtypes), options=options)
    return tuple(_with_dtypes(plan, problem, dtypes) for plan in make_plans(quick, search))


def _with_dtypes(plan: Plan, problem: Problem, dtypes: Sequence[str]) -> Plan:
    """Return a plan with the dtype of each stage, priced so."""
    cluster, pipelines = problem.cluster, []
    for pipeline in plan.pipelines:
        stages = (replace(stage, dtype=cluster.fastest_dtype(stage.devices, dtypes)) for stage in pipeline.stages)
        pipelines.append(replace(pipeline, stages=tuple(stages)))
    made = with_prediction(replace(plan, pipelines=tuple(pipelines), predicted=None), problem)
    if made.predicted is None or plan.predicted is None:
        return made
    kept = ("runner_up", "runner_up_seconds", "bound_seconds")
    found = {name: getattr(plan.predicted, name) for name in kept}
    return replace(made, predicted=replace(made.predicted, **found))


def _allowed(found: Candidates, problem: Problem) -> Candidates:
    return {plan: found[plan] for plan in problem.options.allowed(found)}


def _moved(found: Candidates, problem: Problem) -> Candidates:
    """Return the candidates with getting there from the plan that runs, where that counts."""
    return found if problem.running is None else with_moves(found, problem, problem.running)


def _of_length(found: Candidates, length: int | None) -> dict[Plan, float]:
    return {plan: seconds for plan, seconds in found.items() if plan.max_length == length}


def _best(search: Search, problem: Problem, found: Mapping[Plan, float]) -> Plan:
    """Return the best of plans that compete, with its prediction, the limits of its devices and the runner-up."""
    if search.simulates(problem):
        found = _moved(_simulated(found, problem), problem)
    best = _simplest(found, problem.running)
    notes = [best.predicted.why] if best.predicted is not None else []
    prediction = _told(best, search.predict(best, problem), problem, notes)
    if problem.time_limit.cut:
        prediction = replace(prediction, bound_seconds=bound_seconds(problem.costs, problem.cluster.devices))
    others = [plan for plan in found if _shape(plan, problem.cluster) != _shape(best, problem.cluster)]
    if others:
        second = min(others, key=lambda plan: (found[plan], plan.summary()))
        runner_up, seconds = short_text(second.pipelines), found[second]
        prediction = replace(prediction, runner_up=runner_up, runner_up_seconds=seconds)
    return replace(best, predicted=prediction)


def _simulated(found: Mapping[Plan, float], problem: Problem) -> dict[Plan, float]:
    """Return the plans of least seconds by the closed form, with the seconds that simulations of them take.

    Those that are near the best, as far as they can be simulated in the time that there is, which is counted in jobs,
    so that the answer depends on nothing else. Some are left for plans that take few of them.
    """
    taken, left = dict[Plan, float](), _most_jobs(problem)
    for plan in sorted(found, key=lambda plan: (found[plan], plan.summary())):
        if len(taken) >= LEAST_FINALISTS and found[plan] > WORTH * min(taken.values()):
            break
        jobs = num_jobs(plan) + len(plan.devices)
        if len(taken) < LEAST_FINALISTS or jobs <= max(left // 2, left - ROOM):
            taken[plan] = seconds_by_costs(plan, problem)
            left -= jobs
    return taken | _without_bubbles(taken, problem)


def _without_bubbles(found: Mapping[Plan, float], problem: Problem) -> dict[Plan, float]:
    """Return the best pipelines of these under schedules of smaller bubbles: zero bubble, and both over chunks.

    The searches go through one schedule; what another is better by does not depend on much else.
    """
    near = sorted((plan for plan in found if _has_bubbles(plan)), key=lambda plan: (found[plan], plan.summary()))
    twins = (twin for plan in near[:MOST_TWINS] for twin in _twins(plan, problem.costs.num_blocks))
    taken, left = dict[Plan, float](), _most_jobs(problem)
    for twin in problem.options.allowed(twins):
        plan = _fitting(twin, problem) if num_jobs(twin) <= left else None
        if plan is not None and plan not in taken:
            taken[plan] = seconds_by_costs(plan, problem)
            left -= num_jobs(plan)
    return taken


def _most_jobs(problem: Problem) -> int:
    """Return how many jobs may be simulated of finalists, and again of what they are under other schedules."""
    return MOST_JOBS * max(1, len(problem.cluster.devices) // JOBS_DEVICES)


def _twins(plan: Plan, num_blocks: int) -> Iterator[Plan]:
    """Yield a plan under the other schedules that it can run under."""
    yield replace(plan, schedule="zero-bubble")
    stages = (pipeline.blocks(num_blocks) for pipeline in plan.pipelines if len(pipeline.stages) > 1)
    most = min(MOST_CHUNKS, *map(min, stages))
    counts = [count for count in sorted({2, most}) if 2 <= count <= most]
    yield from (replace(plan, schedule=schedule, chunks=count) for count in counts for schedule in IN_CHUNKS)


def _has_bubbles(plan: Plan) -> bool:
    is_cut = any(len(one.stages) > 1 and one.micro_batches > 1 for one in plan.pipelines)
    return is_cut and plan.schedule == "1f1b" and not plan.has_program


def _fitting(plan: Plan, problem: Problem) -> Plan | None:
    """Return the plan with what it has to recompute under its own schedule; None where it does not fit even so."""
    costs = problem.costs_of(plan)
    found = fit_recompute(plan.with_blocks(costs.num_blocks), costs, problem.cluster, problem.options)
    return None if found is None else found.plan


def with_prediction(plan: Plan, problem: Problem) -> Plan:
    """Return a plan that was given, with what it is expected to cost. Raises `PlanError` where it does not fit."""
    strangers = sorted(set(plan.devices) - set(problem.cluster.ranks))
    if strangers:
        raise PlanError(f"the plan uses devices {strangers}, but the cluster has {list(problem.cluster.ranks)} only")
    prediction = predict_by_costs(plan, problem)
    problems = memory_problems(prediction, problem.cluster)
    notes = [f"does not fit: {'; '.join(problems)}"] if problems else []
    return replace(plan, predicted=_told(plan, prediction, problem, notes))


def _told(plan: Plan, prediction: Prediction, problem: Problem, notes: Sequence[str] = ()) -> Prediction:
    """Return the prediction with what its reader should know.

    That is what each device has, which devices the plan leaves out, and which figures are estimates.
    """
    limits = {device.rank: device.memory_bytes for device in problem.cluster.devices}
    devices = tuple(replace(device, limit_bytes=limits[device.rank]) for device in prediction.devices)
    left_out = tuple(sorted({*problem.cluster.ranks} - {*plan.devices}))
    lines = [prediction.why, *notes, f"state: {problem.costs.state}", *_estimates(problem)]
    return replace(prediction, devices=devices, why="\n".join(lines), left_out=left_out)


def _estimates(problem: Problem) -> Iterator[str]:
    """Say which figures nobody has measured or given."""
    public = [device for device in problem.cluster.devices if device.source == "estimate"]
    if public:
        ranks = ranks_text(device.rank for device in public)
        kinds = sorted({chip_text(device.kind) for device in public})
        yield f"estimate: public figures of {', '.join(kinds)}, which programs do not reach, describe devices {ranks}"
    if problem.profile.source == "estimate":
        yield "estimate: the program's costs are counted from its graph, not measured"


def _simplest(found: Mapping[Plan, float], running: Plan | None) -> Plan:
    """Return the plan with the fewest stages and shards of those negligibly slower than the best.

    One that recomputes nothing comes first. Of equally fast ones that is one of few micro-batches, with states spread,
    and no more. Where a plan is running, it is the best one; that which runs if no other is better.
    """
    if running is not None:
        return min(found, key=lambda plan: (found[plan], plan != running, plan.summary()))
    limit = min(found.values()) * (1 + NEGLIGIBLE)
    near = [plan for plan, seconds in found.items() if seconds <= limit]

    def order(plan: Plan) -> tuple[object, ...]:
        seams = len(plan.devices) - len(plan.pipelines)  # where devices work together: what may be mispredicted
        micro_batches = sum(pipeline.micro_batches for pipeline in plan.pipelines)
        first = plan.recomputes, seams, plan.sequence_parallel, found[plan]
        return *first, micro_batches, not plan.zero, plan.zero, plan.summary()

    return min(near, key=order)


def _shape(plan: Plan, cluster: Cluster) -> object:
    """Return what makes a plan different from others that only swap equal devices or shift rows."""
    shapes = [[_stage_shape(stage, cluster) for stage in pipeline.stages] for pipeline in plan.pipelines]
    return sorted(sorted(shape) for shape in shapes)


def _stage_shape(stage: Stage, cluster: Cluster) -> tuple[list[float], int]:
    return sorted(cluster.device(rank).speed for rank in stage.devices), stage.blocks or 0


def _nothing_fits(problem: Problem, search: Search) -> str:
    costs, cluster, options = problem.costs, problem.cluster, problem.options
    need = costs.state.whole_share * costs.whole.parameter_bytes
    have = sum(device.memory_bytes for device in cluster.devices)
    nearest = min(_extremes(problem), key=lambda one: (sum(one.lacks().values()), one.plan.summary()))
    short = f"{short_text(nearest.plan.pipelines)} with zero {nearest.plan.zero}"
    lacking = [f"device {rank} {bytes_text(count)}" for rank, count in nearest.lacks().items() if count]
    if not lacking:
        return (
            f"search {search.name!r} finds no plan, though {short} fits memory. It is for {search.applies}\n"
            f"hint: ask another search{_or_allow(options)}"
        )
    ways = "".join(f"; {way}" for way in _ways_out(nearest, problem))
    return (
        f"no plan fits the memory of devices {ranks_text(cluster.ranks)}: parameters, gradients and optimizer "
        f"states are {bytes_text(need)}, one row keeps {bytes_text(costs.whole.activation_bytes)} of "
        f"activations. The devices have {bytes_text(have)} together, and plans may use "
        f"{options.memory_fraction:.0%} of it. The plan that lacks least, {short}, lacks {', '.join(lacking)}\n"
        f"hint: use more or larger devices, or shorter sequences{_or_allow(options)}{ways}"
    )


@dataclass(frozen=True)
class _Extreme:
    """A plan that needs little memory, and what its devices have and hold."""

    plan: Plan
    limits: Mapping[int, int]
    held: Mapping[int, Mapping[str, int]]

    @classmethod
    def of(cls, plan: Plan, limits: Mapping[int, int], costs: ProgramCosts) -> _Extreme:
        """Return it with homes by memory."""
        homed = homes_by_memory(plan.with_blocks(costs.num_blocks), costs, limits)
        equal = dict.fromkeys(plan.devices, 1.0)
        return cls(homed, limits, {rank: dict(terms) for rank, terms in device_bytes(homed, costs, equal).items()})

    def lacks(self, share: float = 1.0, without: Sequence[str] = ()) -> dict[int, int]:
        """Return what each device lacks if it holds a share of its bytes, without some terms."""
        needs = {
            rank: share * sum(n for term, n in held.items() if term not in without) for rank, held in self.held.items()
        }
        return {rank: max(0, math.ceil(count) - self.limits[rank]) for rank, count in needs.items()}


def _extremes(problem: Problem, *, recompute: bool | None = None) -> Iterator[_Extreme]:
    """Yield plans over all devices that need little memory: replicas that share everything, and a pipeline."""
    costs, ranks = problem.costs, problem.cluster.ranks
    again = problem.options.recompute if recompute is None else recompute
    limits = {rank: _room(problem, rank) for rank in ranks}
    replicas = [Pipeline((Stage((rank,), blocks=costs.num_blocks),)) for rank in ranks[: costs.rows]]
    shapes = [Plan(tuple(replicas), zero=3 if len(replicas) > 1 else 1)]
    if 1 < len(ranks) <= costs.num_blocks and problem.options.pipelines:
        stages = Pipeline(tuple(Stage((rank,)) for rank in ranks), micro_batches=costs.rows)
        shapes.append(Plan((stages,)).with_blocks(costs.num_blocks))
    for plan in shapes:
        pipelines = (
            replace(one, stages=tuple(s.recomputing((s.blocks or 0) * again) for s in one.stages))
            for one in plan.pipelines
        )
        yield _Extreme.of(replace(plan, pipelines=tuple(pipelines)), limits, costs)


def _room(problem: Problem, rank: int) -> int:
    return problem.cluster.device(rank).usable_bytes(problem.options.memory_fraction)


def _ways_out(nearest: _Extreme, problem: Problem) -> Iterator[str]:
    """Say of what could be done instead how much would be lacking then."""
    lacks, costs = nearest.lacks(), problem.costs
    states = {rank: held["parameters"] + held["optimizer"] for rank, held in nearest.held.items()}
    if all(lacks[rank] <= states[rank] for rank in lacks):
        yield f"{bytes_text(sum(lacks.values()))} of host memory for states would do"
    if not problem.options.recompute:
        again = min(sum(one.lacks().values()) for one in _extremes(problem, recompute=True))
        yield f"with recompute {_lacking(again)}"
    if costs.state.dtype in (None, "fp32") and costs.state.master is None:
        yield f"in bf16 throughout {_lacking(sum(nearest.lacks(0.5).values()))}"
    frozen = sum(nearest.lacks(without=("optimizer", "gradients")).values())
    yield f"with LoRA, but for its own weights, {_lacking(frozen)}"
    count = _enough_devices(problem)
    if count is not None:
        yield f"{count} devices like the largest would do"


def _lacking(count: int) -> str:
    return f"{bytes_text(count)} would be lacking" if count else "it would fit"


def _enough_devices(problem: Problem) -> int | None:
    """Return how many devices like the largest hold replicas that share everything; None where no number does."""
    costs, count = problem.costs, len(problem.cluster.devices)
    room = max(_room(problem, rank) for rank in problem.cluster.ranks)
    blocks = costs.num_blocks * problem.options.recompute
    stages = [Stage((rank,), blocks=costs.num_blocks, recompute=blocks) for rank in range(costs.rows)]

    def fits(number: int) -> bool:
        plan = Plan(tuple(Pipeline((stage,)) for stage in stages[:number]), zero=3)
        return not any(_Extreme.of(plan, dict.fromkeys(range(number), room), costs).lacks().values())

    found = bisect_left(range(count + 1, costs.rows + 1), True, key=fits) + count + 1
    return found if found <= costs.rows else None


def _or_allow(options: PlanOptions) -> str:
    """Return the end of a message that names what plans were forbidden, where that is something."""
    off = sorted({*options.off} - {*PlanOptions().off})
    return f", or allow {' or '.join(off)}" if off else ""


_CODE = (hetu_fx.planner, hetu_fx.comm_ops)  # what decides about plans, and prices them


def default_folder() -> Path:
    """Return where plans are kept for this user: $XDG_CACHE_HOME/hetu_fx/plans, or ~/.cache/hetu_fx/plans."""
    return cache_folder("plans")


def make_or_find_plans(problem: Problem, search: str, folder: Path) -> tuple[Plan, ...]:
    """Return what `make_plans` returns, from the folder if the same has been asked before.

    What is wrong with the folder or a file in it is told in a warning and costs time only.
    """
    key = question_key(problem, search)
    path = folder / f"{key}.json"
    if path.exists():
        try:
            return _read(path, key)
        except PlanError as problem_with_file:
            warnings.warn(f"planning again: {problem_with_file}", stacklevel=2)
    plans = make_plans(problem, search)
    if any(plan.predicted is not None and plan.predicted.bound_seconds is not None for plan in plans):
        return plans  # with more time there may be a better one
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _Answer(key, plans).write(path)
    except OSError as failure:
        warnings.warn(f"the plan is not kept for the next time: {failure}", stacklevel=2)
    return plans


def question_key(problem: Problem, search: str) -> str:
    """Return the digest of a question: equal for equal content, on every machine that runs the same code."""
    question = {
        "search": search,
        "profile": problem.profile.to_json(),
        "cluster": problem.cluster.to_json(),
        "options": asdict(problem.options) | {"seconds": None},
        "steps_ahead": str(problem.steps_ahead),
        "before": None if problem.before is None else problem.before.to_json(),
        "captured": None if problem.captured is None else asdict(problem.captured.hap.program),
        "code": [metadata.version("hetu-fx"), sources_digest(*_CODE)],
    }
    text = json.dumps(question, sort_keys=True, separators=(",", ":"), default=sorted)  # sets are no JSON
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Answer(Document):
    """What a file holds."""

    key: str
    plans: tuple[Plan, ...]


_Answer.form = record(_Answer, PlanError, format="hetu_fx.made_plans/1", plans=Key(many(Plan.form.values)))


def _read(path: Path, key: str) -> tuple[Plan, ...]:
    answer = _Answer.read(path)
    if answer.key != key or not answer.plans:
        raise PlanError(f"{path} does not hold the answer to the question that its name says")
    return answer.plans
