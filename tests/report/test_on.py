"""Functions that the script registers: what they get, when, and what happens where they fail."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import CommError, StateError
from hetu_fx.plans.plan import Plan
from hetu_fx.report.read import read_log
from hetu_fx.report.run_log import SETTLED
from hetu_fx.report.sinks import EVENTS, CallSink, LogEntry

ROWS, LENGTH, WIDTH = 4, 8, 3


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


def batch(length: int = LENGTH) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(ROWS, length, WIDTH)}


@pytest.fixture
def model() -> Any:
    plan = Plan.single()
    return hetu_fx.auto_parallelize(Line(), batch(), plan=plan, cluster=Cluster.on_paper([1e9]))


def train(model: Any, steps: int = 1, length: int = LENGTH) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(**batch(length))["loss"]
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_function_gets_each_step_and_the_last_one_as_it_is_closed(model: Any) -> None:
    seen: list[LogEntry] = []
    told = model.hetu.on("step", seen.append)
    losses = train(model, 3)
    assert [step["step"] for step in seen] == [1, 2], "the third is not over before another begins"
    told.close()
    assert [step["loss"] for step in seen] == losses
    train(model)
    assert len(seen) == 3, "closed"


def test_functions_do_not_disturb_each_other_and_a_block_closes_one(model: Any) -> None:
    steps: list[LogEntry] = []
    plans: list[LogEntry] = []
    switches: list[LogEntry] = []
    model.hetu.on("plan", plans.append)
    model.hetu.on("switch", switches.append)
    with model.hetu.on("step", steps.append):
        train(model)
        model.hetu.add_variant(Plan.single(), name="second")
        model.hetu.switch("second")
        train(model, 2)
    assert len(steps) == 3
    assert [plan["name"] for plan in plans] == ["second"]
    assert [(switch["from"], switch["to"]) for switch in switches] == [("variant0", "second")]


def test_trackers_take_the_numbers_of_a_step_as_they_are(model: Any) -> None:
    logged: list[tuple[str, float, int]] = []
    with model.hetu.on(
        "step", lambda step: [logged.append((name, value, step["step"])) for name, value in step.numbers.items()]
    ):
        (loss,) = train(model)
    found = {name: value for name, value, _ in logged}
    assert found["loss"] == loss
    assert {"seconds", "rows_per_second", "rows/0", "longest"} <= found.keys()
    assert found["rows_per_second"] == pytest.approx(ROWS / found["seconds"])
    assert not {"step", "time", "variant"} & found.keys()
    assert {step for *_, step in logged} == {1}


def test_tensorboard_takes_them_in_three_lines(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    told = model.hetu.on("step", lambda step: [writer.add_scalar(n, v, step["step"]) for n, v in step.numbers.items()])
    train(model, 2)
    told.close()
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("loss")] == [1, 2]


def test_mfu_is_flops_over_time_and_the_peak_of_the_plans_devices(model: Any) -> None:
    seen: list[LogEntry] = []
    with model.hetu.on("step", seen.append):
        train(model)
    flops = 3 * 2 * ROWS * LENGTH * WIDTH * 2
    assert seen[0]["flops"] == pytest.approx(flops)
    assert seen[0]["mfu"] == pytest.approx(flops / seen[0]["seconds"] / 1e9)


def test_mfu_is_left_out_where_the_length_or_the_devices_are_not_those_that_are_known(model: Any) -> None:
    seen: list[LogEntry] = []
    unknown: Any = hetu_fx.auto_parallelize(Line(), batch(), plan=Plan.single())
    with model.hetu.on("step", seen.append):
        train(model, length=2 * LENGTH)
    with unknown.hetu.on("step", seen.append):
        train(unknown)
    assert ["mfu" in step for step in seen] == [False, False]
    assert ["flops" in step for step in seen] == [False, True]
    assert all("rows_per_second" in step for step in seen)


def test_what_a_function_raises_is_told_once_and_training_goes_on(model: Any) -> None:
    calls: list[LogEntry] = []

    def fails(step: LogEntry) -> None:
        calls.append(step)
        raise KeyError("no such run")

    with warnings.catch_warnings(record=True) as seen, model.hetu.on("step", fails):
        warnings.simplefilter("always")
        train(model, 3)
    told = [str(one.message) for one in seen if "model.hetu.on" in str(one.message)]
    assert len(told) == 1
    assert all(part in told[0] for part in ('model.hetu.on("step")', "at step 1", "KeyError: 'no such run'", "fails"))
    assert len(calls) == 3, "it is called all the same"


def test_a_function_may_end_the_script() -> None:
    def ends(step: LogEntry) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        CallSink("step", ends).tell({"event": "step", "step": 1})


def test_an_event_that_there_is_not_is_refused_with_the_nearest(model: Any) -> None:
    with pytest.raises(StateError, match=r"there is no event 'steps'.*'step'.*\nhint: use one of step, "):
        model.hetu.on("steps", print)
    assert {"step", "switch", "plan", "lost"} <= set(EVENTS)


@pytest.mark.parametrize("in_a_call", [True, False], ids=["a call of the model", "anything else in the block"])
def test_a_lost_rank_is_told_before_the_error_comes(model: Any, monkeypatch: Any, *, in_a_call: bool) -> None:
    lost: list[LogEntry] = []

    def raises(*arguments: Any) -> None:
        raise CommError("rank 1 is gone")

    train(model)
    if in_a_call:
        monkeypatch.setattr(model.hetu._runtime, "_agree", raises)
    act: Callable[[], Any] = (lambda: train(model)) if in_a_call else raises
    with pytest.raises(CommError), model.hetu.on("lost", lost.append):
        act()
    assert [(entry["event"], entry["why"]) for entry in lost] == [("lost", "rank 1 is gone")]


def test_a_step_of_each_variant_is_traced_once_and_the_command_writes_it_for_perfetto(
    model: Any, tmp_path: Path
) -> None:
    with model.hetu.log(tmp_path / "run.jsonl"):
        train(model, 2 * SETTLED)
    traces = [entry for entry in read_log(tmp_path / "run.jsonl") if entry["event"] == "trace"]
    assert [(entry["rank"], entry["step"]) for entry in traces] == [(0, SETTLED)]
    (trace,) = traces
    assert {kind for _, kind, _, _ in trace["spans"]} >= {"compute"}
    assert all(0 <= start <= end <= trace["seconds"] for _, _, start, end in trace["spans"])

    from hetu_fx.cli.main import main

    assert main(["report", str(tmp_path / "run.jsonl"), "--trace", str(tmp_path / "none" / "trace.json")]) == 2
    assert main(["report", str(tmp_path / "run.jsonl"), "--trace", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == [
        "steps, by the clock of rank 0", "one step of variant0, measured", "one step of variant0, predicted"
    ]  # fmt: skip
    steps = [event for event in events if event.get("cat") == "step"]
    assert [event["name"] for event in steps] == [f"step {n}: variant0" for n in range(1, 2 * SETTLED + 1)]
    assert all("loss" in event["args"] for event in steps)
    computed = [event for event in events if event.get("cat") == "compute"]
    third = steps[SETTLED - 1]
    assert computed
    for event in computed:  # clocks of the host: one gives the entries' times, another the spans
        assert third["ts"] - 1e5 <= event["ts"] <= third["ts"] + third["dur"] + 1e5
