"""What a log says: pure entries from two states, and the entries of a model that trains."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cli.main import main
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import BatchError, EnvironmentProblem, StateError
from hetu_fx.planner.dispatch.assignment import BatchPlan
from hetu_fx.planner.values.gathered_op import GATHERED_OP
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from hetu_fx.report import read
from hetu_fx.report.read import read_log
from hetu_fx.report.run_log import Batch, State, entries, grown
from hetu_fx.report.sinks import JsonLines, ProgressSink
from hetu_fx.report.summary import entry_text, summaries, summary_text
from hetu_fx.report.updates import Entry
from hetu_fx.switching.eviction import GraphEvent
from hetu_fx.switching.migrate.in_flight import HomeEvent
from tests.report.logs import GATHERED

SHORT, LONG = (
    SimpleNamespace(plan=Plan.single(), predicted_seconds=seconds, planned_rates={}) for seconds in (1.5, 0.0)
)
VARIANTS: Any = {"short": SHORT, "long": LONG}


def state(step: int, variant: str, **more: Any) -> State:
    return State(step, variant, (4,), VARIANTS, **more)


def events(found: list[Entry]) -> list[str]:
    return [entry["event"] for entry in found]


def test_a_step_is_told_beside_what_was_predicted() -> None:
    (entry,) = entries(state(3, "short"), state(4, "short"), Batch(128, 2.0, (0.5, 0.25), 3.5, (0.002, 0.001)))
    assert entry == {
        "event": "step",
        "step": 4,
        "variant": "short",
        "longest": 128,
        "rows": [4],
        "seconds": 2.0,
        "loss": 3.5,
        "predicted_seconds": 1.5,
        "compute_seconds": [0.5, 0.25],
        "host_seconds": [0.002, 0.001],
    }


def test_a_step_of_mixed_lengths_tells_of_its_own_prediction_and_of_planning() -> None:
    planned = BatchPlan((), seconds=0.7, planning_seconds=0.1, waited_seconds=0.02)
    (entry,) = entries(state(3, "short"), state(4, "short", planned=planned), Batch(128, 2.0))
    told = (entry["predicted_seconds"], entry["planning_seconds"], entry["waited_seconds"])
    assert told == (0.7, 0.1, 0.02)


def test_nothing_is_predicted_of_a_plan_given_by_hand() -> None:
    (entry,) = entries(state(3, "long"), state(4, "long"), Batch(128, 2.0))
    assert entry["predicted_seconds"] is None


def test_a_batch_without_training_is_an_evaluation() -> None:
    assert events(list(entries(state(3, "short"), state(3, "short"), Batch(128, 2.0)))) == ["evaluation"]


def test_another_variant_is_a_switch_before_its_step() -> None:
    switch, step = entries(state(3, "short"), state(4, "long"), Batch(512, 2.0))
    assert (switch["from"], switch["to"], switch["step"]) == ("short", "long", step["step"])


def test_the_first_batch_of_a_run_switches_from_nothing() -> None:
    assert events(list(entries(state(0, ""), state(1, "long"), Batch(512, 2.0)))) == ["step"]


def test_new_variants_and_new_rates_are_told() -> None:
    before = replace(state(3, "short"), variants={"short": VARIANTS["short"]})
    plan, health = entries(before, state(3, "short", rates={1: 2.0}), None)
    assert (plan["name"], plan["plan"]) == ("long", LONG.plan.to_json())
    assert health["rates"] == {"1": 2.0}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


def batch_of(length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(4, length, 3)}


@pytest.fixture(scope="module")
def model() -> Any:
    plans = [replace(Plan.single(), name="short", max_length=8), replace(Plan.single(), name="long")]
    return hetu_fx.auto_parallelize(Line(), batch_of(8), plan=plans)


def train(model: Any, *lengths: int) -> None:
    for length in lengths:
        model(**batch_of(length))["loss"].backward()
        model.zero_grad()  # else the gradients of batches are added up, for one step


@pytest.fixture(scope="module")
def log_file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    with model.hetu.log(path):
        train(model, 8, 8, 12, 8)
        with torch.no_grad():
            model(**batch_of(8))
        model.hetu.add_variant(Plan.single(), name="third")
    train(model, 8)  # the log is closed
    return path


def test_a_run_is_told_in_order(log_file: Path) -> None:
    log = read_log(log_file)
    steps = ["built", "step", "step", "switch", "step", "switch", "step"]
    told = [entry for entry in log if entry["event"] not in ("memory", "trace")]
    assert events(told) == ["start", *steps, "evaluation", "plan"]
    assert [entry["variant"] for entry in log if entry["event"] == "step"] == ["short", "short", "long", "short"]
    assert [entry["longest"] for entry in log if entry["event"] == "step"] == [8, 8, 12, 8]
    assert log[0]["variants"] == [entry["name"] for entry in log[0]["plans"]] == ["short", "long"]
    assert Plan.from_json(log[0]["plans"][0]["plan"]) == replace(Plan.single(), name="short", max_length=8)
    assert Profile.from_json(log[0]["profile"]).costs.rows == 4
    assert all(entry["seconds"] > 0 for entry in log if entry["event"] == "step")


def test_graphs_are_told_when_they_are_built_with_their_seconds_and_when_they_are_evicted() -> None:
    built = GraphEvent("built", 4, "short", 2_000_000, 0.25)
    evicted = GraphEvent("evicted", 3, "long", 1_000_000)
    before = state(3, "long", graphs=(built,))
    found = list(entries(before, state(4, "short", graphs=(evicted, built)), Batch(8, 2.0)))
    assert events(found) == ["evicted", "built", "switch", "step"]
    assert found[1] == {"event": "built", "step": 4, "variant": "short", "bytes": 2_000_000, "seconds": 0.25}
    texts = ["step 3: graphs of 'long' evicted, 1 MB", "step 4: graphs of 'short' made in 250 ms"]
    assert [entry_text(entry) for entry in found[:2]] == texts


def test_changes_of_home_are_told_with_what_came_before_training_went_on_and_what_came_beside_it() -> None:
    moved, arrived = HomeEvent("moved", 4, 3_000_000, 0.25, 0.25), HomeEvent("arrived", 5, 6_000_000, 0.5, 0.125)
    before, after = state(3, "long"), state(4, "long", homes=(moved,))
    found = [*entries(before, after, Batch(8, 2.0)), *entries(after, state(5, "long", homes=(arrived,)), None)]
    assert events(found) == ["step", "moved", "arrived"]
    assert found[1] == {"event": "moved", "step": 4, "bytes": 3_000_000, "seconds": 0.25}
    assert found[2] == {"event": "arrived", "step": 5, "bytes": 6_000_000, "seconds": 0.5, "waited_seconds": 0.125}
    assert [entry_text(entry) for entry in found[1:]] == [
        "step 4: homes changed, 3 MB in 250 ms",
        "step 5: optimizer state is home, 6 MB in 500 ms, of which 125 ms were waited for",
    ]


def test_homes_that_follow_a_plan_are_told_with_the_reason() -> None:
    followed = HomeEvent("moved", 3, 2_000_000, 0.25, 0.25, "follows 'b'")
    (entry,) = entries(state(3, "short"), state(3, "short", homes=(followed,)), None)
    assert entry == {"event": "moved", "step": 3, "bytes": 2_000_000, "seconds": 0.25, "why": "follows 'b'"}
    assert entry_text(entry) == "step 3: homes changed, 2 MB in 250 ms: follows 'b'"


def test_the_losses_are_those_that_the_script_was_given_whatever_it_does_to_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone = Line()
    model: Any = hetu_fx.auto_parallelize(copy.deepcopy(alone), batch_of(8), plan=Plan.single())
    with model.hetu.log(tmp_path / "run.jsonl"):
        for length in (8, 12):
            loss = model(**batch_of(length))["loss"]
            loss.backward()
            loss.detach().zero_()
            model.zero_grad()
        with torch.no_grad():
            model(**batch_of(4))
    told = [entry["loss"] for entry in read_log(tmp_path / "run.jsonl") if "loss" in entry]
    assert told == [pytest.approx(alone(**batch_of(length))["loss"].item()) for length in (8, 12, 4)]


def test_the_memory_that_a_process_has_had_is_told(log_file: Path) -> None:
    (told, *_) = (entry["peak_bytes"] for entry in read_log(log_file) if entry["event"] == "memory")
    assert len(told) == 1
    assert 1e8 < told[0] < 1e11, "a process with torch in it"


def test_memory_is_told_again_when_it_has_clearly_grown() -> None:
    assert grown((), (100.0, 0.0)) == (100, 0)
    assert grown((1000, 1000), (1005.0, 900.0)) == (1000, 1000)
    assert grown((1000, 1000), (1100.0, 900.0)) == (1100, 1000)


def test_devices_are_told_again_when_their_speeds_are_corrected() -> None:
    before, after = Cluster.on_paper((1.0, 1.0)), Cluster.on_paper((2.0, 1.0))
    (entry,) = entries(state(3, "short", cluster=before), state(3, "short", cluster=after), None)
    assert (entry["event"], Cluster.from_json(entry["cluster"])) == ("cluster", after)


def test_a_log_of_the_first_format_is_read_as_one_of_today(tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    step = {"event": "step", "step": 1, "variant": "a", "seconds": 1.0, "predicted_seconds": None}
    start = {"event": "start", "format": "hetu_fx.log/1", "processes": 2, "variants": ["a"]}
    old.write_text(f"{json.dumps(start)}\n{json.dumps(step)}\n")
    first, read = read_log(old)
    assert (first["plans"], first["cluster"], first["profile"], read["loss"]) == ((), None, None, None)
    assert [entry_text(entry) for entry in (first, read)] == ["2 processes, variants a", "step 1  a  1 s"]


def test_what_is_gathered_is_told_once_and_again_when_it_changes(tmp_path: Path) -> None:
    alone, priced = state(3, "short"), state(3, "short", gathered={"short": (GATHERED,)})
    (entry,) = entries(alone, priced, None)
    assert (entry["event"], entry["variant"], entry["ops"]) == ("gathered", "short", [GATHERED_OP.write(GATHERED)])
    assert entry_text(entry) == "step 3: 'short' gathers 2.5 MB for aten.matmul.default"
    assert list(entries(priced, priced, None)) == []
    (gone,) = entries(priced, state(4, "short", gathered={"short": ()}), None)
    assert entry_text(gone) == "step 4: 'short' gathers nothing any more"
    assert list(entries(alone, state(3, "short", gathered={"short": ()}), None)) == [], "nothing is not told"


def test_steps_after_a_switch_are_summed_up_apart() -> None:
    step = {"event": "step", "predicted_seconds": None, "loss": None}
    switch = {"event": "switch"}
    log: list[Any] = [{"event": "start"}, {**step, "variant": "a", "seconds": 9.0}]
    log += [{**step, "variant": "a", "seconds": seconds} for seconds in (2.0, 3.0, 2.5)]
    log += [switch, {**step, "variant": "b", "seconds": 1.0}, switch, {**step, "variant": "a", "seconds": 4.0}]
    a, b = summaries(log)
    assert (a.first_seconds, a.seconds, a.switched_seconds) == (9.0, 2.5, 4.0)
    assert (b.first_seconds, b.seconds, b.switched_seconds) == (1.0, None, None)


def test_a_log_is_summed_up_by_variant(log_file: Path) -> None:
    found = summaries(read_log(log_file))
    assert [(summary.name, summary.steps) for summary in found] == [("short", 3), ("long", 1)]
    assert found[1].seconds is None, "the only step is the first one, which makes the graphs"
    text = summary_text(read_log(log_file))
    assert "'short' -> 'long'" in text
    assert "a new plan, 'third'" in text


def test_a_line_cut_short_by_a_kill_is_left_out(log_file: Path, tmp_path: Path) -> None:
    whole = log_file.read_text()
    cut = tmp_path / "cut.jsonl"
    cut.write_text(whole[:-20])
    assert len(read_log(cut)) == len(read_log(log_file)) - 1
    cut.write_text(whole[:20])
    with pytest.raises(StateError, match="not a log"):
        read_log(cut)


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"format": "hetu_fx.plan/1"}\n')
    with pytest.raises(StateError, match=r"not a log of the format 'hetu_fx.log/2'"):
        read_log(other)
    other.write_text('{"event": "start", "format": "hetu_fx.log/9"}\n')
    with pytest.raises(StateError, match=r"format 'hetu_fx.log/9'.* reads hetu_fx.log/1, hetu_fx.log/2"):
        read_log(other)
    start = '{"event": "start", "format": "hetu_fx.log/1", "processes": 1, "variants": []}\n'
    other.write_text(f"{start}nonsense\n{{}}\n")
    with pytest.raises(StateError, match=r"line 2 of .* is not valid JSON"):
        read_log(other)
    with pytest.raises(EnvironmentProblem, match="No such file"):
        read_log(tmp_path / "none")


@pytest.mark.parametrize(
    ("line", "key", "value", "told"),
    [
        (1, "plans", [{"name": "a", "plan": {"format": "hetu_fx.plan/1", "pipelines": 3}}], r"start\.plans\[0\]\.plan"),
        (1, "variants", [1], "start: 'variants' must be a list of strings"),
        (2, "seconds", "long", "step: 'seconds' must be a number, not a string"),
        (2, "compute_seconds", [0.5, None], "step: 'compute_seconds' must be a list of numbers"),
        (2, "second", 1.0, "step: unknown key 'second' .did you mean 'seconds'"),
        (2, "event", "stop", "there is no entry 'stop' .did you mean 'step'"),
        (3, "rates", {"first": 2.0}, r"health: 'rates' has keys \['first'\]"),
    ],
)
def test_an_entry_that_is_not_as_it_is_written_is_refused_with_its_line_and_its_key(
    tmp_path: Path, line: int, key: str, value: Any, told: str
) -> None:
    start = {"event": "start", "format": "hetu_fx.log/2", "processes": 1, "variants": ["a"]}
    step = {"event": "step", "step": 1, "variant": "a", "seconds": 1.0, "predicted_seconds": None}
    entries: list[dict[str, Any]] = [start, step, {"event": "health", "step": 1, "rates": {"1": 2.0}}]
    broken = tmp_path / "broken.jsonl"
    broken.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert len(read_log(broken)) == 3
    entries[line - 1][key] = value
    broken.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with pytest.raises(StateError, match=f"line {line} of .*broken.jsonl: {told}"):
        read_log(broken)


def test_a_line_without_an_end_is_refused_before_it_is_read_whole(
    log_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_bytes(log_file.read_bytes())
    longest = max(map(len, log_file.read_bytes().splitlines()))
    monkeypatch.setattr(read, "MOST_LINE_BYTES", longest + 1)
    assert len(read_log(long)) == len(read_log(log_file)), "the bound is a line's, not the file's"
    with long.open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(StateError, match=f"has more than {longest + 1} bytes"):
        read_log(long)


def test_the_command_sums_a_log_up(log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", str(log_file)]) == 0
    assert "'short' -> 'long'" in capsys.readouterr().out


def test_a_log_that_cannot_be_written_is_an_error(model: Any, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="cannot write the log"):
        model.hetu.log(tmp_path / "no" / "such" / "folder")


def test_progress_without_a_terminal_tells_changes_only() -> None:
    stream = io.StringIO()
    progress = ProgressSink(stream)
    for entry in entries(state(3, "short"), state(4, "long"), Batch(512, 2.0)):
        progress.tell(entry)
    progress.close()
    assert stream.getvalue() == "step 4: 'short' -> 'long'\n"


def test_every_kind_of_entry_has_a_text(log_file: Path) -> None:
    texts = [entry_text(entry) for entry in read_log(log_file)]
    assert all(texts)
    assert entry_text({"event": "health", "step": 3, "rates": {}}) == "step 3: all devices are as they were measured"


def test_lines_are_on_disk_before_the_log_is_closed(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "log")
    sink.tell({"event": "step"})
    assert json.loads((tmp_path / "log").read_text()) == {"event": "step"}
    sink.close()


def test_a_policy_of_ones_own_chooses_the_variant(model: Any) -> None:
    usual = model.hetu.policy
    try:
        model.hetu.policy = lambda variants, batch, health: "long"
        train(model, 8)
        assert model.hetu.current == "long"
        model.hetu.policy = lambda variants, batch, health: "none"
        with pytest.raises(StateError, match="there is no variant 'none'"):
            train(model, 8)
        model.hetu.policy = lambda variants, batch, health: "short"
        with pytest.raises(BatchError, match="the policy chose variant 'short'"):
            train(model, 12)
    finally:
        model.hetu.policy = usual


def test_a_summary_tells_the_host_that_takes_longest_and_reads_logs_without() -> None:
    step = {"event": "step", "variant": "a", "seconds": 1.0, "predicted_seconds": None}
    told: list[Any] = [
        {**step, "host_seconds": [0.5, 0.5]},
        *({**step, "host_seconds": [0.001, 0.002]} for _ in range(2)),
    ]
    start = {"event": "start"}
    assert summaries([start, *told])[0].host_seconds == 0.002
    assert summaries([start, step, step])[0].host_seconds is None
