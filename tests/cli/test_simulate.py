"""`hetu-fx simulate`: a plan, a cluster and a profile in; seconds, memory over time, a trace and pictures out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hetu_fx.cli.main import main
from hetu_fx.cli.simulate import devices_to_show
from hetu_fx.planner.simulate.simulate import simulate
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

COSTS = transformer(rows=16)
CLUSTER = paper(4, 4, 2, memory_bytes=10**8)
PLAN = Plan((Pipeline((Stage((0,), blocks=2), Stage((1,), blocks=2)), 3, 2), Pipeline((Stage((2,), blocks=4),))))

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the command on files of its own; it returns status, output and errors."""
    monkeypatch.chdir(tmp_path)
    Profile(COSTS).write("profile.json")
    CLUSTER.write("cluster.json")
    PLAN.write("plan.json")

    def called(*words: str) -> tuple[int, str, str]:
        files = ("--plan=plan.json", "--cluster=cluster.json", "--profile=profile.json")
        status = main(["simulate", *files, *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return called


def test_the_table_tells_seconds_the_most_memory_and_the_links_that_carry_most(run: Run) -> None:
    status, out, _ = run()
    lines = out.splitlines()
    assert status == 0
    assert lines[0].startswith("simulated step: ")
    assert "hidden by overlap" in lines[1]
    assert lines[2].split() == ["device", "peak", "memory", "at", "bubble"]
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"]
    assert all("of 100 MB" in line for line in lines[3:6])
    assert lines[6].split() == ["link", "carries"]


def test_json_has_the_memory_of_every_device_over_time(run: Run) -> None:
    made, told = simulate(PLAN, COSTS, CLUSTER), json.loads(run("--json")[1])
    assert told["seconds"] == made.seconds
    assert {device["rank"]: device["peak_bytes"] for device in told["devices"]} == dict(made.peak_bytes)
    for device in told["devices"]:
        times = [seconds for seconds, _ in device["memory"]]
        assert times == sorted(times)
        assert max(count for _, count in device["memory"]) == device["peak_bytes"]
    assert {(link["from"], link["to"]): link["bytes"] for link in told["links"]} == dict(made.link_bytes)


def test_a_trace_and_a_page_are_written(run: Run) -> None:
    run("--trace=trace.json", "--picture=step.html")
    names = {event["name"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert {f"memory of device {rank}" for rank in range(3)} <= names
    assert "memory of device 1, at most" in Path("step.html").read_text()


def test_a_slower_device_makes_the_step_longer(run: Run) -> None:
    before, after = (json.loads(run("--json", *words)[1])["seconds"] for words in ([], ["--rate", "2=4"]))
    assert after > 1.5 * before


def test_a_picture_of_many_devices_shows_one_of_each_stage() -> None:
    stages = [[(100 * i + 2 * j, 100 * i + 2 * j + 1) for j in range(4)] for i in range(9)]
    plan = Plan(tuple(Pipeline(tuple(Stage(group, blocks=1) for group in own)) for own in stages))
    assert devices_to_show(plan) == (0, 2, 4, 6)
    assert devices_to_show(PLAN) == (0, 1, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--picture=step.pdf"], "--picture step.pdf has ending '.pdf'\nhint: use '.html'"),
        (["--trace=nowhere/trace.json"], "--trace nowhere/trace.json: there is no folder"),
        (["--without", "2"], "the plan uses devices [2], but the cluster has 0, 1 only"),
        (["--plan=no.json"], "cannot read no.json"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(run: Run, words: list[str], message: str) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert message in err
