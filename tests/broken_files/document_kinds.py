"""Documents: plans, clusters, profiles, logs and whatever else is JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from examples.demo.record import RunRecord, StepRecord, Throughput
from hetu_fx.base.records import Document
from hetu_fx.check.kept import Answer, KeptAnswers
from hetu_fx.planner.values.profile_file import BlockTime, Profile, Slowdown
from hetu_fx.plans.plan import Plan
from hetu_fx.report.page import report_json
from hetu_fx.report.read import read_log
from hetu_fx.report.summary import to_json
from hetu_fx.show.timeline import Event, Timeline
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides
from hetu_fx_align.call import Call
from hetu_fx_align.losses import read_losses
from hetu_fx_align.saved import read_call, save_call
from hetu_fx_emulate.emulate import current_speeds
from tests.broken_files.kind import Kind, Promise
from tests.broken_files.trained import plain
from tests.planner.examples import paper, transformer
from tests.report.logs import log

NAME = "made[1].json"


def _document(make: Callable[[int], Document]) -> Kind:
    """Return the kind of a document that has a class."""
    return Kind(
        lambda folder, number: make(number).write(folder / NAME),
        lambda folder: type(make(0)).read(folder / NAME).to_json(),
        promise=Promise.FINITE,
    )


def _plan(number: int) -> Plan:
    started = log(4)[0]
    return replace(Plan.from_json(started["plans"][0]["plan"]), name=f"plan {number}")


def _profile(number: int) -> Profile:
    return Profile(
        transformer(layers=4 + number),
        tokens_per_row=64,
        source="estimate",
        other_lengths=((128, transformer(layers=4 + number, length=128)),),
        times=(BlockTime("A800-80G", 4, 1e-9, 2e-6, 1e-4, 1000.0, 0.999, "measured"),),
        alpha=(Slowdown("A800-80G", {4: 1.0, 2: 1.9, 1: 3.66}),),
        sequences={64: 10.0, 256: 0.5 + number},
    )


def _write_log(folder: Path, number: int) -> None:
    lines = [json.dumps(entry) + "\n" for entry in log(2, steps=5 + number)]
    (folder / "run[1].jsonl").write_text("".join(lines))


def _read_log(folder: Path) -> Any:
    found = read_log(folder / "run[1].jsonl")
    return plain([to_json(found), report_json(found)])


def _write_losses(folder: Path, number: int) -> None:
    (folder / NAME).write_text(json.dumps([2.5 / (step + 1) + number for step in range(20)]))


def _write_call(folder: Path, number: int) -> None:
    weight = torch.arange(12.0).view(3, 4).add(number).t().requires_grad_()
    save_call(Call.of(torch.ops.aten.cat.default, ([weight, torch.ones(4, 3)], 1), {}), folder / NAME)


def _read_call(folder: Path) -> Any:
    call = read_call(folder / NAME)
    return plain([call.name, call.leaves, call.needs_gradient, call.tensor_names])


def _write_answers(folder: Path, number: int) -> None:
    KeptAnswers(folder).put(Answer("0" * 64, True, f"as one device, to {number} digits"))


def _read_answers(folder: Path) -> Any:
    found = KeptAnswers(folder).get("0" * 64)
    return None if found is None else found.to_json()


def _write_emulation(folder: Path, number: int) -> None:
    state = {"format": "hetu_fx.emulation/1", "name": "run", "kind": "CgroupV2", "bases": [str(folder)]}
    (folder / "state.json").write_text(json.dumps({**state, "speeds": [0.5, 0.25 + number / 8], "num_cores": 2}))


def _read_emulation(folder: Path) -> Any:
    return current_speeds(folder)


def _write_demo(folder: Path, number: int) -> None:
    steps = tuple(StepRecord(step, 3.0 - step / 10, 1.0, 100, 64, "usual", {0: 1.0}) for step in range(4 + number))
    timeline = Timeline((Event(0, "step 1: forward", 0.0, 0.5, "forward"),))
    shares = {"healthy": Throughput((10, 20), (1.0, 1.0))}
    plans = {"usual": Plan.data_parallel([0, 1]).to_json()}
    RunRecord(steps, "device 1", 1, shares, plans, timeline, timeline, 2.5, "abc", 1000).write(folder / NAME)


DOCUMENT_KINDS: Mapping[str, Kind] = {
    "plan": _document(_plan),
    "cluster": _document(lambda number: paper(1.0, 2.0, 3.0 + number, nodes="aab")),
    "profile": _document(_profile),
    "overrides": _document(
        lambda number: OpOverrides({"aten.softmax.int": "up-cast", "aten.gelu.default": ("on host", "up-cast")[number]})
    ),
    "log": Kind(_write_log, _read_log, promise=Promise.ANYTHING),
    "losses": Kind(_write_losses, lambda folder: plain(read_losses(folder / NAME)), promise=Promise.ANYTHING),
    "saved op": Kind(_write_call, _read_call, promise=Promise.ANYTHING),
    "answers of checks": Kind(_write_answers, _read_answers, promise=Promise.ANYTHING),
    "emulation": Kind(_write_emulation, _read_emulation, promise=Promise.FINITE),
    "run of the demo": Kind(
        _write_demo, lambda folder: asdict(RunRecord.read(folder / NAME)), promise=Promise.ANYTHING
    ),
}
