"""What `benchmarks.traces` executes: batches of mixed lengths, losses of devices, and what runs before have kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.traces.__main__ import Kept, executed
from benchmarks.traces.hydraulis import MixedLengths
from benchmarks.traces.trace import Named, Trace
from hetu_fx.plans.plan import Pipeline, Plan, Stage

LENGTHS = ((12, 3, 5, 2, 7, 4), (3, 12, 2, 2, 6))
UNLIKE = (
    Pipeline((Stage((0, 1)),), share=2, max_length=12),
    Pipeline((Stage((2,)), Stage((3,))), share=2, max_length=7),
)
WHOLE = Plan((Pipeline((Stage((0, 1)),)), Pipeline((Stage((2,)), Stage((3,))))), zero=0)
LEFT = Plan((Pipeline((Stage((0,)),)), Pipeline((Stage((2, 3)),))), zero=0)


def test_sequences_of_mixed_lengths_train_as_each_in_a_row_of_its_own() -> None:
    trace = MixedLengths("none", "unlike", (Plan(UNLIKE, max_length=12),), 2, 8, 2, steps=LENGTHS)
    verdict = trace.execute().verdict
    assert verdict.verdict == "equal", verdict


def test_plans_change_between_batches_of_mixed_lengths() -> None:
    plans = Plan(UNLIKE, max_length=12, name="unlike"), Plan.tensor_parallel((0, 1))
    trace = MixedLengths("none", "in turn", plans, 2, 8, 2, steps=LENGTHS)
    assert trace.execute().verdict.verdict == "equal"


def test_what_a_loss_of_devices_moves_is_what_is_priced() -> None:
    row = executed(Trace("none", "a loss", (WHOLE, LEFT), 2, 8, 2, lost=(frozenset(), frozenset({1}))))
    assert max(float(str(row[f"{what} difference"])) for what in ("loss", "gradient", "parameter")) < 1e-10
    assert float(str(row["moved / priced"])) == pytest.approx(1.0, rel=0.01)


def test_what_has_been_executed_is_taken_from_the_file(tmp_path: Path) -> None:
    def fail() -> Trace:
        raise AssertionError("it is kept")

    path = tmp_path / "kept.jsonl"
    made = Kept(path).row(Named("none", "one device", lambda: Trace("none", "one device", (Plan.single(),), 1, 8, 2)))
    assert Kept(path).row(Named("none", "one device", fail)) == made
    with pytest.raises(AssertionError, match="it is kept"):
        Kept(path).row(Named("none", "another", fail))
