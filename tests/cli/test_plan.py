"""`hetu-fx plan`: files in, a plan and its reasons out; neither a model nor devices are there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hetu_fx.cli.main import main
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.left_out import with_reasons
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.searches import SEARCHES
from hetu_fx.planner.values.options import FEATURES
from hetu_fx.planner.values.profile_file import BlockTime, Profile
from hetu_fx.plans.plan import Plan
from hetu_fx.show.table import print_table
from tests.planner.examples import paper, transformer

COSTS = transformer(rows=16, length=128, width=128)
CLUSTER = paper(4, 4, 2, nodes="aab", inter=Link(1e9, 1e-5))
RUNS = Plan.data_parallel((0, 1))

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the command on files of its own; it returns status, output and errors."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    monkeypatch.chdir(tmp_path)
    Profile(COSTS).write("profile.json")
    CLUSTER.write("cluster.json")

    def called(
        *words: str, files: Sequence[str] = ("--cluster=cluster.json", "--profile=profile.json")
    ) -> tuple[int, str, str]:
        status = main(["plan", *files, *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return called


def test_a_plan_is_made_from_files_and_explained(run: Run) -> None:
    status, out, _ = run()
    made = make_plan(COSTS, CLUSTER)
    assert status == 0
    assert out == f"{made.explain()}\n"
    assert "bound by device" in out


def test_json_is_the_plan_and_nothing_else(run: Run) -> None:
    _, out, _ = run("--json", "--out=plan.json")
    plan = Plan.from_json(json.loads(out))
    assert plan == Plan.read("plan.json") == make_plan(COSTS, CLUSTER)
    assert plan.predicted is not None


def test_the_output_is_the_same_from_the_cache_and_without_it(run: Run, tmp_path: Path) -> None:
    first = run("--search=malleus")
    kept = list((tmp_path / "cache" / "hetu_fx" / "plans").iterdir())
    assert len(kept) == 1
    assert run("--search=malleus") == first
    assert run("--search=malleus", "--no-cache") == first


def test_rows_may_be_others_than_the_profiles(run: Run) -> None:
    _, out, _ = run("--rows=32", "--json")
    assert Plan.from_json(json.loads(out)) == make_plan(transformer(rows=32, length=128, width=128), CLUSTER)


def test_a_sweep_says_from_where_on_devices_pay(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("--sweep", "rows=2,64", "link=10mbit,8gbit")
    assert status == 0
    header, *lines = out.splitlines()
    assert header.split() == ["rows", "link", "step", "rows/s", "devices", "plan"]
    assert [line.split()[:3] for line in lines[:4]] == [
        [rows, rate, unit] for rows in ("2", "64") for rate, unit in (("10", "Mbit/s"), ("8", "Gbit/s"))
    ]
    assert any(line.startswith("from 64 rows a step") and "devices " in line for line in lines[4:])
    _, out, _ = run("--sweep", "rows=2", "--json")
    (point,) = json.loads(out)
    assert (point["rows"], point["link"]) == (2, None)
    assert set(point["devices"]) <= {0, 1, 2}


@pytest.mark.parametrize("given", ["rows", "rows=", "rows=2,x", "speed=3", "rows=0"])
def test_a_sweep_of_nothing_is_refused(run: Run, given: str) -> None:
    status, _, err = run("--sweep", given)
    assert (status, "--sweep" in err, "rows=64,256" in err) == (2, True, True)


def test_what_if_shows_what_changes_and_what_it_costs(run: Run) -> None:
    _, out, _ = run("--without", "1", "--rate", "2=2.5", "--link", "100mbit")
    lines = out.splitlines()
    start = lines.index("what if without 1, rate 2=2.5, link 100mbit:")
    changed = Cluster(CLUSTER.devices, CLUSTER.intra, Link(100e6 / 8, 1e-5)).with_rates({2: 2.5}).without([1])
    made = with_reasons(make_plan(COSTS, changed), Problem(Profile(COSTS), changed))
    assert lines[:start] == made.explain().splitlines()
    assert lines[start + 1].split() == ["before", "after"]
    assert lines[start + 2].startswith("predicted step  ")
    assert lines[start + 2].endswith(" %)")
    assert max(map(len, lines[start:])) <= 100


def test_what_if_nothing_else_is_best_says_no_difference(run: Run) -> None:
    _, out, _ = run("--rate", "2=1.0001")
    assert "no difference" in out


def test_a_plan_by_hand_is_priced_and_told_when_it_does_not_fit(run: Run) -> None:
    Plan.single(2).write("mine.json")
    _, out, _ = run("mine.json")
    assert "bound by device 2" in out
    paper(4, 4, 2, memory_bytes=1000).write("cluster.json")
    _, out, _ = run("mine.json")
    assert "does not fit: device 2 needs" in out


def test_figures_that_are_estimates_are_named(run: Run) -> None:
    document = CLUSTER.to_json()
    document["devices"] = [{"rank": rank, "kind": "A100-80G"} for rank in range(2)]
    Path("cluster.json").write_text(json.dumps(document))
    Profile(COSTS, source="estimate").write("profile.json")
    _, out, _ = run()
    lines = out.splitlines()
    assert "estimate: public figures of A100-80G, which programs do not reach, describe devices 0, 1" in lines
    assert "estimate: the program's costs are counted from its graph, not measured" in lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--search=maleus"], "unknown search 'maleus' (did you mean 'malleus'?)"),
        (["--without", "7"], "--without [7]: the cluster has ranks [0, 1, 2]\nhint: name some of them, not all"),
        (["--without", "0", "1", "2"], "name some of them, not all"),
        (["--rate", "2"], "'2' is not a rank and its straggling rate\nhint: write it like --rate 2=2.5"),
        (["--rate", "9=2"], "rates for ranks [9]"),
        (["--rate", "1=0"], "device 1 has rate 0.0"),
        (["--rate", "1=0.5"], "device 1 has rate 0.5, but a straggling rate is 1 (healthy) or more"),
        (["--out", "nowhere/plan.json"], "--out nowhere/plan.json: there is no folder"),
        (["--out", "cache"], "--out cache is a folder\nhint: name a file in it"),
        (["--forbid", "pipelines"], "plans have no feature 'pipelines' to allow or forbid (did you mean 'pipeline'?)"),
        (["--seconds", "-1"], "search has seconds -1.0"),
        (["--steps", "10"], "spread over the steps that are left\nhint: give --before FILE too"),
        (["--before", "plan.json"], "spread over the steps that are left\nhint: give --steps N too"),
        (["--link", "fast"], "link rate 'fast' is not a rate"),
        (["--rows", "0"], "rows 0"),
        (["no.json"], "cannot read no.json"),
        (["--profile=no.json"], "cannot read no.json"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_and_a_hint(run: Run, words: list[str], message: str) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert message in err
    assert [line[:6] for line in err.splitlines()[1:]] in ([], ["hint: "])


def test_what_is_forbidden_is_in_no_plan(run: Run) -> None:
    _, out, _ = run("--json", "--forbid", "data_parallel", "uneven", "--zero", "0")
    plan = Plan.from_json(json.loads(out))
    assert len(plan.pipelines) == 1
    assert plan.zero == 0


def test_where_all_that_fits_is_forbidden_the_message_says_so(run: Run) -> None:
    status, _, err = run("--search=contiguous", "--forbid", "data_parallel", "tensor_parallel", "pipeline", "--zero=1")
    assert status == 0
    paper(4, 4, memory_bytes=4_000_000).write("cluster.json")
    status, _, err = run("--forbid", "tensor_parallel", "pipeline")
    assert status == 2
    assert "or allow pipeline or tensor_parallel" in err


def test_a_search_whose_time_is_over_says_what_it_may_lack_and_is_not_kept(run: Run, tmp_path: Path) -> None:
    _, out, _ = run("--seconds", "1e-9")
    assert "best so far" in out
    assert "no plan takes less than" in out
    assert not (tmp_path / "cache" / "hetu_fx").exists()
    _, whole, _ = run("--seconds", "1e6")
    assert "best so far" not in whole
    assert run("--seconds", "1e-9")[1] == whole, "the answer that is known by now is the whole one"


def test_a_job_with_few_steps_left_stays_and_one_with_many_moves(run: Run) -> None:
    RUNS.write("runs.json")
    few, many = (json.loads(run("--json", "--before", "runs.json", "--steps", steps)[1]) for steps in ("1e-6", "1e9"))
    assert [*Plan.from_json(few).devices] == [*RUNS.devices]
    assert [*Plan.from_json(many).devices] != [*RUNS.devices]


def test_figures_of_a_kind_that_no_device_has_are_refused_before_the_search(run: Run) -> None:
    Profile(COSTS, 128, times=(BlockTime("papr", 1, 0.0, 1e-6),)).write("profile.json")
    status, _, err = run()
    assert status == 2
    assert "times of kind 'papr', but no device of the cluster is of that kind (did you mean 'paper'?)" in err


def test_help_lists_the_searches_and_what_can_be_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in (*SEARCHES, *FEATURES):
        assert [line for line in lines if line.startswith(f"  {name} ")], name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster=cluster.json"], "give --profile FILE too"),
        (["--profile=profile.json"], "give --cluster FILE too"),
        ([], "planning needs --cluster FILE and --profile FILE"),
        (["--without", "1"], "--without needs --cluster FILE and --profile FILE"),
    ],
)
def test_what_is_missing_is_said(run: Run, words: list[str], message: str) -> None:
    status, _, err = run(*words, files=())
    assert status == 2
    assert message in err


def test_a_link_between_nodes_needs_nodes(run: Run) -> None:
    paper(4, 4).write("cluster.json")
    assert "one node only" in run("--link", "1gbit")[2]


@pytest.mark.parametrize(
    ("terminal", "rich", "drawn"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_tables_are_drawn_on_a_terminal_that_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, rich: bool, drawn: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    print_table(["device", "busy"], [["7", "98 %"]])
    lines = capsys.readouterr().out.splitlines()
    assert (lines == ["device  busy", "7       98 %"]) is not drawn
    assert any("98 %" in line for line in lines)
