"""What the benchmark of mixed lengths makes of seconds, and the arms of its ablation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.lengths.ablation import BASE, MODES, arms
from benchmarks.lengths.contest import sample_of
from benchmarks.lengths.rounds import details, gain, predicted_gain, speed, terms


def columns(seconds: list[float], **others: list[float]) -> dict[str, list[Any]]:
    zeros = [0.0] * len(seconds)
    rest = {"predicted": zeros, "planning": zeros, "waited": zeros, "computing": zeros, "on_processor": zeros}
    return {"tokens": [100] * len(seconds), "seconds": seconds, **rest, **others}


def test_gains_are_by_round_where_both_ran_the_same() -> None:
    ours, theirs = columns([1.0, 10.0, 1.0]), columns([2.0, 20.0, 3.0])
    assert gain(ours, theirs) == 2.0
    assert gain(ours, columns([2.0])) == pytest.approx(speed(ours) / 50)


def test_a_gain_is_predicted_only_where_both_are() -> None:
    ours, theirs = columns([1.0], predicted=[1.0]), columns([1.0], predicted=[1.5])
    assert predicted_gain(ours, theirs) == {"predicted": 1.5}
    assert predicted_gain(ours, columns([1.0])) == {}


def test_a_round_is_the_longest_compute_and_a_rest_as_expected_and_as_measured() -> None:
    taken = {"computing": [3.0, 3.0], "slowness": [1.0, 1.5]}
    found = terms(columns([4.0, 6.0], predicted=[3.0, 5.0], to_compute=[2.0, 4.0], **taken))
    assert found == {
        "compute s predicted": 3.0,
        "compute s": 3.0,
        "all ranks' over expected": 1.25,
        "rest s predicted": 1.0,
        "rest s": 2.0,
    }
    assert terms(columns([4.0])) == {}


def test_planning_is_hidden_as_far_as_no_step_waited_for_it() -> None:
    found = details(columns([1.0, 1.0], planning=[0.5, 0.5], waited=[0.25, 0.0]))
    assert found["planning s"] == 0.5
    assert found["hidden share"] == 0.75
    assert "hidden share" not in details(columns([1.0]))


def test_the_ablation_has_every_mode_and_what_they_are_compared_with() -> None:
    found = arms(8)
    assert BASE in found
    assert all(any(mode in who for who in found) for mode in MODES)


def test_what_is_padded_has_the_longest_sequence() -> None:
    texts = [torch.ones(length) for length in (3, 9, 1, 5)]
    assert [len(text) for text in sample_of(texts, 2)] == [9, 3]
