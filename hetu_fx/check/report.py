"""What is said of a plan that is wrong: what differs, which op differs first, and a case to report."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch

from hetu_fx.check.blame import first_wrong
from hetu_fx.check.blocks import KeptBlocks
from hetu_fx.check.kept import code_digest
from hetu_fx.check.trial import Case, Found
from hetu_fx.graph.bind import flatten_batch
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.graph_execution import GraphExecution

_FEW = 5  # gradients that are named


def failure_text(plan: Plan, case: Case, found: Found, captured: GraphExecution | None, blocks: KeptBlocks) -> str:
    """Return the message of an error for a plan that is wrong."""
    names = blocks.original_names()
    first = "" if captured is None else first_wrong(case, found, captured)
    lines = [
        f"the plan {plan.summary()} was tried on a small case of the model, and does not give what one device gives: "
        f"{differences_text(found)}",
        *([first] if first else []),
        *_hints(case, found),
        f"case: {json.dumps(_case(case, plan, blocks))}",
    ]
    return "\n".join(_with_names(line, names) for line in lines)


def _hints(case: Case, found: Found) -> list[str]:
    if found.remembers and case.eager is None:
        return [
            "hint: on one device a second step like the first gives something else: the forward goes by what it keeps "
            "in Python (a counter, an iterator) or reads elsewhere (a clock, a file), which a graph repeats as it was; "
            "keep it in a buffer (register_buffer), set it outside of the forward, or use "
            'hetu_fx.auto_parallelize(..., capture="eager")'
        ]
    if case.eager is not None:
        return [
            "hint: each replica has run all rows, and yet they differ: let the module follow from its inputs, "
            "parameters and the random numbers of torch, random and numpy.random alone, or use one device "
            "(hetu_fx.Plan.single())"
        ]
    return [
        "hint: report the case below, and use another plan meanwhile; check=False trains all the same, and gives what "
        "stands above"
    ]


def differences_text(found: Found) -> str:
    """Return what differs from one device, and by how much."""
    if found.failure:
        return f"its ranks do not go through a step: {found.failure}"
    said = []
    if found.loss_is_wrong:
        right, made = found.losses
        which = f" of step {found.step}" if found.step > 1 else ""
        said.append(f"the loss{which} is {made:.10g}, not {right:.10g}")
    wrong, total = found.wrong, len(found.gradients or {}) + len(found.buffers or {})
    if wrong:
        most = sorted(wrong.items(), key=lambda entry: -entry[1])[:_FEW]
        named = ", ".join(f"{name} by {difference:.1e}" for name, difference in most)
        said.append(f"{len(wrong)} of {total} gradients and buffers differ, relative to their norms: {named}")
    return "; ".join(said)


def _with_names(line: str, names: Mapping[str, str]) -> str:
    """Return a text in which shortened lists have the numbers of the whole model's."""
    for short, path in sorted(names.items(), key=lambda pair: -len(pair[0])):
        if short != path:
            line = line.replace(f"{short}.", f"<{path}>.").replace(f"'{short}'", f"'<{path}>'")
    for path in names.values():
        line = line.replace(f"<{path}>", path)
    return line


def _case(case: Case, plan: Plan, blocks: KeptBlocks) -> dict[str, Any]:
    """Return what somebody needs to try the same again."""
    inputs = {name: f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in _inputs(case).items()}
    return {
        "plan": case.plan.to_json(),
        "whole_plan": plan.to_json() | {"predicted": None},
        "rows": case.rows,
        "inputs": inputs,
        "parameters": sum(p.numel() for p in case.model.parameters()),
        "model": type(case.model).__qualname__,
        "blocks": [len(blocks.kept), len(blocks.paths)],
        "dtype": str(case.dtype),
        "capture": "graph" if case.eager is None else "eager",
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "hetu_fx": code_digest()[:12]},
    }


def _inputs(case: Case) -> dict[str, torch.Tensor]:
    return flatten_batch(case.batch)[1]
