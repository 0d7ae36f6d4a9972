"""A log becomes one page that needs nothing from elsewhere, and the same as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.cli.main import main
from hetu_fx.planner.values.gathered_op import GATHERED_OP
from hetu_fx.report.page import SECTIONS, by_kind, html_page, report_json
from hetu_fx.report.read import read_log
from hetu_fx.report.run import read_run
from hetu_fx.report.updates import Entry
from hetu_fx.show.charts import PLACES, places
from hetu_fx.show.lanes import visible_events
from hetu_fx.show.timeline import Event
from tests.base.seen_html import Seen
from tests.report.logs import GATHERED, NAMES, log

OLD = (
    {"event": "start", "format": "hetu_fx.log/1", "processes": 2, "variants": ["a<b"]},
    {"event": "step", "step": 1, "variant": "a<b", "longest": 8, "rows": [3, 1], "seconds": 1.0}
    | {"predicted_seconds": 0.5, "compute_seconds": [0.4, 0.2]},
)


def old_log(folder: Path) -> tuple[Entry, ...]:
    file = folder / "old.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in OLD))
    return read_log(file)


@pytest.mark.parametrize(("devices", "steps"), [(2, 1), (2, 30), (64, 10_000)])
def test_a_page_is_well_formed_small_and_points_at_nothing_but_its_own_sections(devices: int, steps: int) -> None:
    page = html_page(log(devices, steps), "run")
    seen = Seen(page)
    assert seen.links
    assert {link.removeprefix("#") for link in seen.links} == set(seen.anchors) <= SECTIONS.keys()
    assert not any(word in page for word in ("<script", "url(", "@import", "http"))
    assert seen.metas["viewport"].startswith("width=device-width")
    assert len(page) < 1_000_000


def test_all_sections_are_shown_of_a_run_that_changes_its_plan() -> None:
    assert Seen(html_page(log(4, 30), "run")).anchors == list(SECTIONS)


def test_names_are_escaped(tmp_path: Path) -> None:
    page = html_page(old_log(tmp_path), "<b>")
    assert "<h1>&lt;b&gt;</h1>" in page
    assert "a&lt;b" in page
    assert "a<b" not in page


def test_an_old_log_has_what_it_knows_and_says_what_it_does_not(tmp_path: Path) -> None:
    page = html_page(old_log(tmp_path), "run")
    assert Seen(page).anchors == ["variants", "losses", "steps", "timeline", "cluster"]
    assert "The log has no loss" in page
    assert "give auto_parallelize a cluster" in page


def test_a_log_without_steps_is_a_page_too() -> None:
    start, *_ = log(2, 1)
    assert Seen(html_page([start], "run")).anchors == ["timeline", "memory", "traffic", "cluster", "plans"]


def test_many_steps_share_places_and_none_is_lost() -> None:
    groups = places(range(1000), most=7)
    assert [number for group in groups for number in group] == list(range(1000))
    assert {len(group) for group in groups} <= {142, 143}
    assert places([1, 2]) == [[1], [2]]
    assert places([]) == []
    seen = Seen(html_page(log(2, 5 * PLACES), "run"))
    assert PLACES < seen.tags["rect"] < 2 * PLACES


def test_losses_that_are_no_finite_numbers_are_counted_not_drawn() -> None:
    entries = [{**entry, "loss": math.nan} if entry.get("step") == 2 else entry for entry in log(2, 4)]
    assert "1 losses are no finite numbers" in html_page(entries, "run")
    told = report_json(entries)
    assert [entry["loss"] for entry in told["losses"]][1] is None
    json.dumps(told, allow_nan=False)


def test_a_timeline_leaves_out_what_is_narrower_than_a_dot_beside_another() -> None:
    wide = Event(0, "forward", 0.0, 0.5, "forward")
    thin = [Event(0, "forward", 0.5 + number * 1e-5, 0.5 + (number + 1) * 1e-5, "forward") for number in range(1000)]
    message = Event(0, "send", 0.5, 0.50001, "send")
    shown = visible_events([wide, *thin, message], 1.0)
    assert shown[:2] == [wide, thin[0]]
    assert message in shown
    assert 10 <= len(shown) <= 14, "a hundredth of the picture has ten dots"


def test_the_predicted_step_stands_beside_the_measured_one_by_device() -> None:
    told = report_json(log(2, 9))["timeline"]
    assert list(told) == list(NAMES)
    first = told[NAMES[0]]
    assert first["measured_seconds"] == pytest.approx(1.2 * first["predicted_seconds"], rel=0.1)
    for device in first["devices"]:
        assert device["measured_compute_seconds"] == pytest.approx(1.1 * device["predicted_compute_seconds"])


def test_traffic_by_kind_and_by_link_add_up_to_the_same() -> None:
    run = read_run(log(4, 9))
    for name, kinds in zip(NAMES, ({"gather", "gradients"}, {"gather", "gradients", "send"}), strict=True):
        step = run.on_paper[name]
        assert by_kind(step).keys() == kinds
        assert sum(by_kind(step).values()) == pytest.approx(sum(step.link_bytes.values()))


def test_memory_is_told_by_term_with_what_processes_have_had() -> None:
    told = report_json(log(2, 9))["memory"]
    assert told["peak_bytes"] == [10**8, 10**8 + 1]
    for device in told["predicted"][NAMES[0]]:
        assert device["bytes"] == sum(device["terms"].values()) > 0


def test_devices_are_those_that_the_first_steps_have_corrected() -> None:
    entries = log(2, 3)
    assert read_run(entries).cluster.device(1).flops_per_second == 3e9  # type: ignore[union-attr]
    corrected: dict[str, Any] = json.loads(json.dumps(entries[0]["cluster"]).replace("3000000000.0", "9e9"))
    entries.append({"event": "cluster", "step": 3, "cluster": corrected})
    assert read_run(entries).cluster.device(1).flops_per_second == 9e9  # type: ignore[union-attr]


def test_what_is_gathered_is_told_by_variant_with_its_line_and_what_would_avoid_it() -> None:
    entries = log(2, 3)
    told = report_json(entries)["gathered"]
    assert told == {NAMES[0]: [{**GATHERED_OP.write(GATHERED), "cure": GATHERED.cure}]}
    page = html_page(entries, "run")
    assert "loss.py:4, in head: return u @ v.t() &lt; 0" in page
    assert GATHERED.cure in page
    entries.append({"event": "gathered", "step": 3, "variant": NAMES[0], "ops": []})
    assert report_json(entries)["gathered"] == {}
    assert "gathered" not in Seen(html_page(entries, "run")).anchors, "where nothing is, nothing is said"


def test_the_command_writes_the_page_beside_the_log_or_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in log()))
    assert main(["report", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"processes", *SECTIONS}
    assert not (tmp_path / "run.html").exists()
    assert main(["report", str(file)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.html'}\n"
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")
