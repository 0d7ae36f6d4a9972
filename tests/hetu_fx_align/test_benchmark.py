"""The alignment benchmark's judgement: what is planted, what counts as found, and which bars hold."""

from __future__ import annotations

import pytest

from benchmarks.align.__main__ import bars
from benchmarks.align.faults import FAULTS, Planted, planted
from benchmarks.align.page import document
from benchmarks.align.subjects import EXPLAINED, NAMES, Subject
from benchmarks.align.trainings import FAULTY
from benchmarks.families.families import FAMILIES
from hetu_fx.transforms.rewrites.op_overrides import find_op
from hetu_fx_align.interpret import graph_to_align, values_of_leaves
from tests.hetu_fx_align.nets import net_and_batch

DTYPE = {
    "of": "dtype: net: unet, bf16",
    "way": "bf16",
    "ops": 3,
    "calls": 4,
    "within": 2,
    "explained": "",
    "loss": 1e-3,
}
ROWS = [
    DTYPE | {"unexplained": "aten.exp.default result 1.0e-01 (4.0e-03)", "drifts first": ""},
    {"of": "fault: gpt2, 1 %", "found": True},
    {"of": "losses of a kind that is honest: bf16", "alike": True, "mean relative error": 0.001},
    {"of": "losses of a kind that is faulty: x", "alike": True, "mean relative error": 0.001},
]


def net_subject() -> Subject:
    model, batch = net_and_batch()
    graph = graph_to_align(model, batch)
    return Subject("net", graph, values_of_leaves(graph, model, batch))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_one_op_and_is_found(fault: str, number: int) -> None:
    made = planted(net_subject(), fault, number)
    assert made.is_found, made
    assert (made.direction == "backward") == (fault == "1 %" and number % 2 == 1)


def test_another_op_beside_or_in_the_place_of_the_wrong_one_is_not_found() -> None:
    assert Planted("net", "1 %", "forward", "a", "a", "forward a").is_found
    assert not Planted("net", "1 %", "forward", "a", "a, b", "forward a").is_found
    assert not Planted("net", "1 %", "forward", "a", "a", "forward b").is_found
    assert not Planted("net", "1 %", "forward", "a", "a", "none").is_found


def test_families_that_were_not_reached_and_ops_without_a_reason_miss_their_bars() -> None:
    found = {bar.name: (bar.value, bar.bar) for bar in bars(ROWS, ["gpt2"], ["dtype", "inductor", "faults", "losses"])}
    assert found == {
        "dtype: rows without an unexplained op": (0, 2),
        "inductor: rows without an unexplained op": (0, 1),
        "planted faults found and named": (1, 3),
        "kinds told right by their losses": (1, 1 + len(FAULTY)),
    }


def test_the_page_has_a_row_for_each_family_and_says_why() -> None:
    page = document(ROWS)
    assert "| net: unet | bf16 | 3 | 4 | 2 |" in page
    assert "1 of\n1 are found" in page
    assert all(why in page for why in EXPLAINED.values())


def test_families_and_ops_are_there() -> None:
    assert len(set(NAMES)) == 20
    assert set(NAMES) <= FAMILIES.keys()
    for _, op in EXPLAINED:
        assert str(find_op(op, "here")) == op
