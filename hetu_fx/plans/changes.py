"""What changes between two plans, for logs and the command line."""

from __future__ import annotations

from hetu_fx.base.words import ranks_text
from hetu_fx.plans.plan import Plan
from hetu_fx.plans.tables import have_few_devices, rows_text, short_text


def changes(before: Plan, after: Plan) -> list[tuple[str, str | None, str | None]]:
    """Return what is not the same in two plans, as (what, before, after); None where there is no such thing."""
    old, new = _facts(before), _facts(after)
    found = [(key, old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]
    return [(key, was, now) for key, was, now in found if was != now]


def diff(before: Plan, after: Plan) -> str:
    """Return what changes from one plan to another, one line each, or `no difference`."""
    lines = [f"  {key}: {was} -> {now}" for key, was, now in changes(before, after) if was and now]
    gone = [f"- {key}: {was}" for key, was, now in changes(before, after) if now is None]
    come = [f"+ {key}: {now}" for key, was, now in changes(before, after) if was is None]
    return "\n".join([*gone, *come, *lines]) or "no difference"


def _facts(plan: Plan) -> dict[str, str]:
    facts = {"name": str(plan.name), "schedule": plan.schedule_text, "zero": str(plan.zero)}
    facts |= {"max_length": str(plan.max_length), "split": str(dict(plan.split))}
    facts["sequence_parallel"] = str(plan.sequence_parallel)
    if not have_few_devices(plan.pipelines):
        return facts | {"pipelines": short_text(plan.pipelines), "devices": ranks_text(plan.devices)}
    for index, pipeline in enumerate(plan.pipelines):
        facts[f"pipelines[{index}]"] = f"{rows_text(pipeline)}: {pipeline}"
    return facts
