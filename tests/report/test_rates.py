"""Rows and tokens a second, and MFU, from what is known of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.cluster.chips import find_chip
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.report.rates import peak_flops, step_rates
from tests.report.test_updates import batch


def test_rates_are_what_was_done_over_the_seconds_and_what_is_not_known_is_left_out() -> None:
    step = {"seconds": 2.0, "tokens": 600, "flops": 4e12}
    assert step_rates(step, 8, 1e13) == {"rows_per_second": 4.0, "tokens_per_second": 300.0, "mfu": 0.2}
    assert step_rates({"seconds": 2.0, "flops": 4e12}, 8, None) == {"rows_per_second": 4.0}
    assert step_rates({"seconds": 0.0, "tokens": 600}, 8, 1e13) == {}


def test_the_peak_is_what_a_given_cluster_says_and_of_measured_devices_the_public_figure_of_their_kind() -> None:
    given = Cluster.on_paper([3e12, 2e12, 1e12])
    assert peak_flops(given, [0, 2]) == 4e12
    assert peak_flops(given, [0, 7]) is None
    assert peak_flops(None, [0]) is None
    measured = [replace(device, source="measured") for device in given.devices]
    assert peak_flops(replace(given, devices=tuple(measured)), [0]) is None, "nobody knows the peak of these"
    known = [replace(device, kind="NVIDIA H200") for device in measured]
    chip = find_chip("NVIDIA H200")
    assert chip is not None
    assert peak_flops(replace(given, devices=tuple(known)), [0, 1]) == 2 * chip.flops()


@pytest.mark.parametrize(
    ("one", "other", "tokens"),
    [({"tokens": 5}, {"tokens": 7}, 12), ({"tokens": 5}, {}, None), ({}, {"tokens": 7}, None)],
)
def test_tokens_of_a_step_of_several_batches_are_known_where_those_of_all_are(
    one: dict[str, int], other: dict[str, int], tokens: int | None
) -> None:
    from hetu_fx.report.updates import _sum

    assert _sum(batch(**one), batch(**other)).get("tokens") == tokens
