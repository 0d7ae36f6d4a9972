"""What a rank has read stays for those that read it later; what it does not give is explained."""

from __future__ import annotations

import re

import pytest
import torch

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.errors import StateError
from hetu_fx.switching.home.held import COPIED, JOINT, Key, Readable, Readings, host_part, is_copy, why_not
from hetu_fx.switching.home.ops import HomeTensor, home_layout

CUT = Annotation.on((0, 1), Split(0, (2, 1)))
WHOLE = torch.arange(12.0).view(6, 2)


def home(rank: int = 0) -> HomeTensor:
    return HomeTensor.from_full(WHOLE, home_layout(CUT, (6, 2), rank, 2))


def test_readings_stay_while_a_rank_writes_and_reads_on() -> None:
    readings = Readings()
    reads = [((("w",), writes, str(CUT)), None) for writes in range(6)]
    for writes, read in enumerate(reads):
        readings.keep(read, torch.tensor([float(writes)]))
    found = list(map(readings.part, reads))
    assert [None if part is None else part.item() for part in found] == [None, None, 2, 3, 4, 5]
    assert readings.part(((("b",), 0, str(CUT)), None)) is None
    readings.clear()
    assert readings.part(reads[5]) is None


def test_a_part_is_given_at_the_writes_that_are_asked_for() -> None:
    tensor = home(1)
    held = Readable.home(tensor)
    layout = str(CUT)
    found = held.after(held.writes, layout)
    assert found is not None
    assert found.local.tolist() == WHOLE[4:].tolist()
    before = held.writes
    tensor.mul_(2)
    assert held.writes > before
    assert held.after(before, layout) is None


def test_a_tensor_that_lies_otherwise_is_refused() -> None:
    held = Readable.home(home())
    with pytest.raises(StateError, match=r"it lies as .* there, as elsewhere where it is asked for"):
        held.after(held.writes, "elsewhere")


def test_a_piece_on_its_way_is_not_given() -> None:
    tensor = home()
    held = Readable(tensor, None, None)
    assert held.after(held.writes, str(CUT)) is None


def test_only_counted_elements_are_given() -> None:
    nowhere = home_layout(Annotation.on((1,)), (6, 2), 0, 2)
    assert host_part(torch.empty(nowhere.local_shape), nowhere).numel() == 0
    assert host_part(home().local, home().home_layout).tolist() == WHOLE[:4].flatten().tolist()


def test_copies_are_told_from_what_has_a_name() -> None:
    assert is_copy(("w", COPIED, "0", "torch.float32"))
    assert not is_copy((COPIED,))  # a parameter may be called so


@pytest.mark.parametrize(
    ("key", "wanted", "text"),
    [
        ((JOINT, "0", "(6, 2)", "torch.float32"), 0, r"shape \(6, 2\) that is neither a parameter nor"),
        (("w", "0", "exp_avg"), 5, "the optimizer's 'exp_avg' of 'w' after 5 writes, and this rank has made"),
        (("w",), 5, "make the same writes on all ranks, or call full_tensor"),
        (("w",), -1, "parameter 'w' as it was after -1 writes, and this rank has gone on"),
        (
            ("w", "gradient", "3"),
            -1,
            "the gradient of 'w' as it was after -1 writes, .* read between backward\\(\\) and",
        ),
    ],
)
def test_what_is_not_given_is_explained(key: Key, wanted: int, text: str) -> None:
    told = why_not(key, [Readable.home(home())], wanted, 1, 1)
    assert re.search(text, told), told


def test_a_gradient_that_is_no_longer_there_or_not_yet_is_explained() -> None:
    key = ("w", "gradient", "3")
    gone = [Readable(None, None, None)]
    assert "the gradient of 'w' as it was after 0 writes, and this rank has gone on; read" in why_not(
        key, gone, 0, 1, 1
    )
    assert "the gradient of 'w', which this rank has not had within 1 s" in why_not(key, [], 0, 1, 1)


def test_copies_of_which_there_are_several_are_explained() -> None:
    key = ("w", COPIED, "0", "torch.float32")
    two = [Readable.home(home()), Readable.home(home())]
    assert "a copy of parameter 'w', of which there are 2 here after 1 s" in why_not(key, two, 0, 1, 1)
    assert "of which there are 0 here" in why_not(key, [], 0, 1, 1)
