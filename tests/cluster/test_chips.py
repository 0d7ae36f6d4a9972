from dataclasses import replace

import pytest

from hetu_fx.cluster.chips import CHIPS, DTYPES, chip_text, find_chip, unknown_chip
from hetu_fx.errors import ClusterError


def test_names_are_found_in_any_spelling_and_belong_to_one_chip() -> None:
    assert find_chip("a100_80g") is find_chip("NVIDIA A100-SXM4-80GB") is find_chip("A100")
    names = [name for chip in CHIPS for name in (chip.name, *chip.other_names)]
    assert all(find_chip(name) is chip for chip in CHIPS for name in (chip.name, *chip.other_names))
    assert len(set(names)) == len(names)


def test_a_chip_that_is_not_known_is_none_and_the_nearest_is_named() -> None:
    assert find_chip("cpu") is None
    assert unknown_chip("H10O-80G").endswith("(did you mean 'H100-80G'?)")


def test_a_name_without_its_memory_says_which_chip_is_meant() -> None:
    told = ["A100 (as A100-80G)", "v100 (as V100-32G)", "A100-40G", "L4", "cpu"]
    assert [chip_text(text.partition(" ")[0]) for text in told] == told


def test_every_chip_says_where_its_figures_stand_and_is_slower_in_wider_types() -> None:
    for chip in CHIPS:
        assert chip.source
        speeds = [chip.flops_per_second[dtype] for dtype in DTYPES if dtype in chip.flops_per_second]
        assert speeds == sorted(speeds, reverse=True)
        assert chip.flops() == speeds[0]


def test_speeds_are_asked_for_by_element_type() -> None:
    old = find_chip("V100-32G")
    assert old is not None
    assert old.flops("fp32") == pytest.approx(15.7e12)
    assert old.flops() == 125e12  # it has no bf16
    with pytest.raises(ClusterError, match="has no figure for dtype 'bf16'\nhint: give one of fp16, fp32"):
        old.flops("bf16")


def test_figures_that_cannot_be_are_refused() -> None:
    with pytest.raises(ClusterError, match="chip T4 has memory_bytes 0\nhint: give a finite number above 0"):
        replace(CHIPS[3], memory_bytes=0)
    with pytest.raises(ClusterError, match="speeds for"):
        replace(CHIPS[3], flops_per_second={"fp64": 1.0})
