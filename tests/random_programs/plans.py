"""Random plans for a model with so many blocks, and plans with less in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import ATTENTIONS, SCHEDULES, Pipeline, Plan, Stage

MOST_RANKS = 5


def draw(r: Random, blocks: int) -> Plan:
    """Draw a plan that can be, for a model of so many blocks."""
    while True:
        try:
            plan = _drawn(r, blocks)
            plan.check(num_blocks=blocks, world_size=MOST_RANKS)
        except PlanError:
            continue
        return plan


def _drawn(r: Random, blocks: int) -> Plan:
    devices = list(range(r.randint(2, MOST_RANKS)))
    r.shuffle(devices)
    pipelines = tuple(_pipeline(r, part, blocks) for part in _cut(r, devices))
    shares_sequence = any(stage.shares_sequence for pipeline in pipelines for stage in pipeline.stages)
    schedule = r.choice(SCHEDULES) if r.random() < 0.3 else "1f1b"
    return Plan(
        pipelines,
        schedule=schedule,
        zero=r.choice((0, 1)),
        sequence_parallel=r.random() < 0.1,
        chunks=r.choice((0, 2)) if schedule in ("interleaved", "zero-bubble") else 0,
        attention=r.choice(("auto", "auto", *ATTENTIONS)) if shares_sequence else "auto",
    )


def _cut(r: Random, devices: list[int]) -> list[list[int]]:
    """Cut devices into groups, most often one or two."""
    cuts = sorted(r.sample(range(1, len(devices)), r.choice((0, 0, 1, 1, 2)))) if len(devices) > 2 else []
    cuts = cuts if len(devices) != 2 else r.choice(([], [1]))
    return [devices[a:b] for a, b in zip([0, *cuts], [*cuts, len(devices)], strict=True)]


def _pipeline(r: Random, devices: list[int], blocks: int) -> Pipeline:
    parts = _cut(r, devices) if r.random() < 0.5 and len(devices) > 1 else [devices]
    stages = tuple(_stage(r, part, blocks) for part in parts)
    return Pipeline(stages, share=r.choice((1, 1, 2, 3)), micro_batches=r.choice((1, 1, 2, 3)))


def _stage(r: Random, devices: list[int], blocks: int) -> Stage:
    count = len(devices)
    context = r.choice([n for n in range(1, count + 1) if count % n == 0]) if r.random() < 0.15 else 1
    group = count // context if 1 < context < count else count
    ratios = tuple(r.choice((1, 1, 2, 3)) for _ in range(group)) if r.random() < 0.5 else ()
    recompute = r.choice((0, 1)) if blocks and r.random() < 0.3 else 0
    is_grid = 1 < context < count
    cuts = tuple(r.choice((1, 1, 2)) for _ in range(context)) if is_grid and r.random() < 0.5 else ()
    return Stage(tuple(devices), ratios, context=context, context_ratios=cuts, recompute=recompute)


def smaller(plan: Plan) -> Iterator[Plan]:
    """Yield plans with less in them; those that cannot be are left out."""
    for make in _SMALLER:
        for changed in make(plan):
            if changed != plan:
                yield changed


def _fewer_pipelines(plan: Plan) -> Iterator[Plan]:
    for i in range(len(plan.pipelines) if len(plan.pipelines) > 1 else 0):
        yield from _tried(plan, pipelines=plan.pipelines[:i] + plan.pipelines[i + 1 :])


def _plainer(plan: Plan) -> Iterator[Plan]:
    yield from _tried(plan, schedule="1f1b", chunks=0)
    yield from _tried(plan, zero=1)
    yield from _tried(plan, sequence_parallel=False)


def _plainer_pipelines(plan: Plan) -> Iterator[Plan]:
    for i, pipeline in enumerate(plan.pipelines):
        for changed in _of_pipeline(pipeline):
            yield from _tried(plan, pipelines=(*plan.pipelines[:i], changed, *plan.pipelines[i + 1 :]))


def _of_pipeline(pipeline: Pipeline) -> Iterator[Pipeline]:
    stages = pipeline.stages
    yield replace(pipeline, micro_batches=1)
    yield replace(pipeline, share=1)
    for i in range(len(stages) if len(stages) > 1 else 0):
        yield replace(pipeline, stages=stages[:i] + stages[i + 1 :])
    for i, stage in enumerate(stages):
        for changed in _of_stage(stage):
            yield replace(pipeline, stages=(*stages[:i], changed, *stages[i + 1 :]))


def _of_stage(stage: Stage) -> Iterator[Stage]:
    yield replace(stage, recompute=0)
    yield replace(stage, context_ratios=())
    yield replace(stage, context=1, context_ratios=(), ratios=())
    yield replace(stage, ratios=(1,) * len(stage.ratios))
    if len(stage.devices) > 1 and stage.context == 1:
        yield replace(stage, devices=stage.devices[:-1], ratios=stage.ratios[:-1])


def _tried(plan: Plan, **changes: object) -> Iterator[Plan]:
    try:
        yield replace(plan, **changes)  # type: ignore[arg-type]
    except PlanError:
        return


_SMALLER = (_fewer_pipelines, _plainer_pipelines, _plainer)
