"""The demo's pure parts: settings, text, devices' changes, records, and what is said of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.demo import demo
from examples.demo.data import (
    PAD,
    START,
    Text,
    digest,
    library_pieces,
    make_model,
    num_parameters,
    num_tokens,
    own_rows,
    stacked,
)
from examples.demo.demo import MARK, make_room
from examples.demo.devices import changes
from examples.demo.record import RunRecord, StepRecord, Throughput, steady, throughput
from examples.demo.report import (
    Comparison,
    Loaded,
    Reference,
    around_the_change,
    compare,
    comparison_text,
    draw_run,
    phases,
)
from examples.demo.screen import Screen, make_screen
from examples.demo.settings import FULL, QUICK, DemoSettings
from examples.demo.training import health_text
from hetu_fx.batches.packing import IGNORED
from hetu_fx.errors import EnvironmentProblem
from hetu_fx.plans.plan import Plan
from hetu_fx.show.timeline import Event, Timeline

PIECES = (b"def short(): pass", b"x" * 1000, b"y = 1")
USUAL, LONG, NEW = "usual", "long", "rates 1=2.5"


def record(step: int, variant: str, *, seconds: float = 1.0, longest: int = QUICK.length) -> StepRecord:
    slow = variant == NEW
    return StepRecord(step, 3.0 - step / 10, seconds, 100, longest, variant, {0: 1.0, 1: 2.5 if slow else 1.0})


def a_run() -> RunRecord:
    variants = [USUAL] * 7 + [LONG] + [USUAL] * 6 + [NEW] * 10
    records = [record(i, v, longest=QUICK.shape(i)[1]) for i, v in enumerate(variants)]
    events = [Event(0, f"step {i + 1}: forward", float(i), i + 0.5, "forward") for i in range(QUICK.steps)]
    plans = {v: Plan.data_parallel([0, 1], [i + 1, 1]).to_json() for i, v in enumerate((USUAL, LONG, NEW))}
    return RunRecord(
        records=tuple(records),
        slowed="device 1 slowed",
        slowed_rank=1,
        even_shares={"healthy": Throughput((10, 20), (1.0, 1.0)), "slowed": Throughput((10,), (2.0,))},
        plans=plans,
        measured=Timeline(tuple(events)),
        predicted=Timeline(()),
        held_out_loss=2.5,
        weights="abc",
        num_parameters=1000,
    )


def a_reference(shift: float = 0.0) -> Reference:
    return Reference(tuple(record.loss + shift for record in a_run().records), 2.0, 2)


@pytest.mark.parametrize("settings", [FULL, QUICK])
def test_settings_leave_room_on_two_cores(settings: DemoSettings) -> None:
    assert sum(settings.speeds) <= 1.6 + 1e-9
    assert sum(settings.equal_speeds(2.0)) < 2.0
    assert max(settings.equal_speeds(2.0)) <= 1.0, "a rank has one thread"
    assert settings.slowed_speed < settings.speeds[settings.slowed_rank]


def test_rows_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="18 and 4 rows cannot be shared evenly by 4 ranks"):
        replace(QUICK, rows=18)
    with pytest.raises(EnvironmentProblem, match="must be steps from 0 to 23"):
        replace(QUICK, long_at=(24,))


def test_the_full_model_has_about_ten_million_parameters() -> None:
    with torch.device("meta"):
        model = make_model(FULL)
    assert 9e6 < num_parameters(model) < 11e6


def test_sequences_are_cut_and_padded_and_padding_is_ignored() -> None:
    batch = stacked([b"abcdef", b"a"], 4)
    assert batch["input_ids"].tolist() == [[START, 97, 98, 99], [START, 97, PAD, PAD]]
    assert batch["labels"].tolist() == [[START, 97, 98, 99], [START, 97, IGNORED, IGNORED]]
    assert num_tokens(batch) == 4


def test_a_batch_is_a_function_of_its_step() -> None:
    text = Text(QUICK, PIECES)
    assert torch.equal(text.batch(3)["input_ids"], text.batch(3)["input_ids"])
    assert not torch.equal(text.batch(3)["input_ids"], text.batch(4)["input_ids"])
    assert text.batch(3)["input_ids"].shape == (QUICK.rows, QUICK.length)


def test_long_batches_have_no_padding() -> None:
    text, (step, *_) = Text(QUICK, PIECES), QUICK.long_at
    long = text.batch(step)
    assert long["input_ids"].shape == (QUICK.long_rows, QUICK.long_length)
    assert num_tokens(long) == QUICK.long_rows * (QUICK.long_length - 1)


def test_text_without_long_pieces_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match=f"no piece of the text has {QUICK.long_length} bytes"):
        Text(QUICK, [b"short"])


def test_ranks_rows_make_the_global_batch() -> None:
    batch = Text(QUICK, PIECES).batch(0)
    parts = [own_rows(batch, rank, 4)["labels"] for rank in range(4)]
    assert torch.equal(torch.cat(parts), batch["labels"])
    assert len({part.shape for part in parts}) == 1


def test_the_library_is_the_same_text_every_time(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\n\n\ndef f():\n    pass\n")
    assert library_pieces(folder=str(tmp_path)) == (b"import os", b"def f():\n    pass")
    assert library_pieces(5) == library_pieces(5)


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="no Python sources"):
        library_pieces(folder=str(tmp_path))


def test_devices_become_slower_before_others_become_faster() -> None:
    assert changes((0.4, 0.4, 0.4, 0.4), (0.8, 0.4, 0.2, 0.2)) == [2, 3, 0]
    assert changes((0.8, 0.4), (0.8, 0.4)) == []


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    a_run().write(tmp_path / "run.json")
    assert RunRecord.read(tmp_path / "run.json") == a_run()


def test_first_steps_on_a_plan_and_long_batches_are_not_steady() -> None:
    records = [record(0, USUAL), record(1, USUAL), record(2, LONG, longest=999), record(3, USUAL, longest=999)]
    assert [r.step for r in steady(records, QUICK.length)] == [1]
    assert throughput([]) is None


def test_phases_are_told_apart_by_the_slow_down_and_the_new_plan() -> None:
    before, after = phases(a_run(), QUICK)
    assert {r.step for r in before} == {*range(1, 7), *range(8, 12)}
    assert [r.step for r in after] == list(range(15, 24))


def test_the_comparison_is_of_medians_and_the_largest_difference() -> None:
    found = compare(a_run(), a_reference(2e-4), QUICK)
    assert (found.healthy, found.even_healthy, found.even_slowed) == (100.0, 15.0, 5.0)
    assert found.difference == pytest.approx(2e-4)
    assert not found.is_exact
    assert compare(a_run(), a_reference(), QUICK).is_exact


def test_the_last_screen_shouts_what_is_wrong() -> None:
    run, reference = a_run(), a_reference(1.0)
    text = comparison_text(run, reference, Loaded(False, 2.4), compare(run, reference, QUICK), QUICK)
    assert "MORE THAN 0.0001" in text
    assert "weights DIFFER from the parallel model's" in text


def test_without_a_new_plan_nothing_is_claimed_for_it() -> None:
    run = replace(a_run(), records=tuple(record(i, USUAL) for i in range(QUICK.steps)))
    found = compare(run, a_reference(), QUICK)
    assert found.slowed is None
    text = comparison_text(run, a_reference(), Loaded(True, 2.5), found, QUICK)
    assert "no step ran on a plan made for the slowed device" in text


def test_the_timeline_shows_the_steps_around_the_change() -> None:
    shown = around_the_change(a_run(), QUICK, steps=2)
    assert [event.name for event in shown.events] == [f"step {n}: forward" for n in range(11, 18)]


def test_the_run_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run, reference = a_run(), a_reference()
    draw_run(tmp_path / "demo.png", run, reference, compare(run, reference, QUICK), QUICK)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_health_names_slow_devices_only() -> None:
    assert health_text({0: 1.0, 1: 2.5}) == "noticed: device 1 takes 2.5 times as long"
    assert health_text({0: 1.0}) == "noticed: all devices are as they were measured"


def test_equal_weights_have_equal_digests() -> None:
    ones = {"a": torch.ones(2, 3)}
    assert digest(ones) == digest({"a": torch.ones(3, 2).t()})
    assert digest(ones) != digest({"a": torch.ones(2, 3) * (1 + 1e-6)})


def test_without_a_terminal_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    screen = make_screen()
    assert type(screen) is Screen
    for number in range(1, 9):
        screen.step(number, 8, 2.0, 100.0, USUAL)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["4/8", "8/8"]
    make_screen(shows=False).say("hidden")
    assert capsys.readouterr().out == ""


def test_every_part_ends_with_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    screen = make_screen()
    for part in ("one", "two"):
        screen.head(part)
    screen.end()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert [line for line in lines if line.startswith("==")] == ["== one", "== two"]
    assert [line for line in lines if re.fullmatch(r"\(\d+ s\)", line)] == [lines[1], lines[3]]


def test_only_a_folder_of_the_demo_is_replaced(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    make_room(mine)
    (mine / "old.txt").write_text("old")
    make_room(mine)
    assert [path.name for path in mine.iterdir()] == [MARK]
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(EnvironmentProblem, match="is not a demo's\nhint: choose another with --output"):
        make_room(other)


@pytest.mark.parametrize(("difference", "status"), [(1e-9, 0), (1.0, 1)])
def test_with_json_stdout_has_the_outcome_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], difference: float, status: int
) -> None:
    outcome = Comparison(difference, 10.0, 8.0, 6.0, 3.0), Loaded(same_weights=True, held_out_loss=2.5)
    monkeypatch.setattr(demo, "_run_ranks", lambda *args, **kwargs: print("a step") or 0)
    monkeypatch.setattr(demo, "_conclude", lambda *args: outcome)
    assert demo.run_demo(tmp_path / "demo", as_json=True) == status
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["status"], told["difference"], told["same_weights"]) == (status, difference, True)
    assert "a step" in printed.err
