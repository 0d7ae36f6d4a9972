from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetu_fx.errors import ProfileError
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import BlockTime, Profile, Slowdown
from hetu_fx.planner.values.program import ProgramCosts
from tests.model_zoo import captured
from tests.planner.examples import transformer
from tests.planner.programs import uncut

COSTS = transformer(layers=4)
FULL = Profile(
    COSTS,
    tokens_per_row=64,
    source="estimate",
    mixes_rows=True,
    other_lengths=((256, transformer(layers=4, length=256)), (128, transformer(layers=4, length=128))),
    times=(BlockTime("A800-80G", 4, 1e-9, 2e-6, 1e-4, 1000.0, 0.999, "measured"), BlockTime("T4", 1, 0.0, 1e-6)),
    alpha=(Slowdown("A800-80G", {4: 1.0, 2: 1.9, 1: 3.66}),),
    sequences={64: 10.0, 256: 0.5},
)
SMALL: dict[str, Any] = {"format": "hetu_fx.profile/1", "program": {"rows": 8, "blocks": [{"count": 2, "flops": 10}]}}
EDGE = {"boundary_bytes": [{"bytes": 4}]}


def small(program: dict[str, Any], **others: Any) -> Profile:
    return Profile.from_json(SMALL | {"program": SMALL["program"] | EDGE | program} | others)


def test_a_written_profile_reads_back_equal(tmp_path: Path) -> None:
    for profile in (FULL, Profile(COSTS), Profile(ProgramCosts(3, PartCosts(flops=1.5), (), PartCosts()))):
        profile.write(tmp_path / "profile.json")
        assert Profile.read(tmp_path / "profile.json") == profile


def test_what_the_memory_model_needs_reads_back_equal(tmp_path: Path) -> None:
    costs = program_costs(**uncut(captured("gpt2")[1]))
    assert costs.memory is not None
    assert costs.tied
    Profile(costs).write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json").costs == costs


def test_memory_of_other_parts_than_the_program_has_is_refused() -> None:
    with pytest.raises(ProfileError, match="memory has 2 parts, the program 4"):
        small({"memory": {"parts": [{"count": 2, "kept": {"per_row": 8}}]}})
    with pytest.raises(ProfileError, match="part 4 reads a tied parameter, but parts are 0 to 3"):
        small({"tied": [{"bytes": 8, "readers": [1, 4]}]})
    with pytest.raises(ProfileError, match=r"tied\[0\].*readers are \[1\]\nhint: give two parts or more"):
        small({"tied": [{"bytes": 8, "readers": [1]}]})
    with pytest.raises(ProfileError, match=r"memory.parts\[0\].kept.*'rows'"):
        small({"memory": {"parts": [{"count": 4, "kept": {"rows": 8}}]}})


def test_what_repeats_is_written_once() -> None:
    written = FULL.to_json()["program"]
    assert [block["count"] for block in written["blocks"]] == [4]
    assert written["boundary_bytes"] == [{"count": 3, "bytes": COSTS.boundary_bytes[0]}]


def test_a_profile_by_hand_says_little() -> None:
    profile = small({})
    block = PartCosts(flops=10.0)
    assert profile.costs == ProgramCosts(8, PartCosts(), (block, block), PartCosts(), (4.0,))
    assert (profile.source, profile.tokens_per_row, profile.mixes_rows, profile.sequences) == ("given", 0, False, {})


def test_lookups_are_by_kind_and_length() -> None:
    assert FULL.block_times("A800-80G")[4].seconds(100) == pytest.approx(1e-9 * 1e4 + 2e-6 * 100 + 1e-4)
    assert FULL.slowdown("A800-80G")[2] == 1.9
    assert (FULL.block_times("cpu"), FULL.slowdown("cpu")) == ({}, {})
    assert list(FULL.by_length) == [64, 128, 256]
    assert Profile(COSTS).by_length == {}


def test_rows_change_for_all_lengths() -> None:
    changed = FULL.with_rows(7)
    assert {costs.rows for costs in changed.by_length.values()} == {7}
    assert changed.with_rows(COSTS.rows) == FULL


@pytest.mark.parametrize(
    ("program", "others", "message"),
    [
        ({"flop": 1}, {}, "profile: program: unknown key 'flop'"),
        ({"blocks": [{"flop": 1}]}, {}, r"program.blocks\[0\]: unknown key 'flop' \(did you mean 'flops'\?\)"),
        ({"blocks": [{"count": 0}]}, {}, r"blocks\[0\]: count is 0\nhint: give the number of equal ones in a row"),
        ({"blocks": [{"flops": 1, "split_flops": 2}]}, {}, r"blocks\[0\]: part costs: split_flops is 2.0"),
        ({"before": {"num_ops": -1}}, {}, "program.before has num_ops -1\nhint: give a finite number, 0 or more"),
        ({"before": {"num_ops": 1.5}}, {}, "'num_ops' must be a whole number"),
        ({"boundary_bytes": []}, {}, "program: program costs: 0 boundaries for 2 blocks\nhint: give 1"),
        ({"boundary_bytes": [{"bytes": -4}]}, {}, r"boundary_bytes\[0\] has bytes -4.0"),
        ({"rows": 0}, {}, "rows 0, units 1, sequence_units 1\nhint: give 1 or more of each"),
        ({"source": "guess"}, {}, "program has source 'guess'"),
        ({}, {"time": []}, r"profile: unknown key 'time' \(did you mean 'times'\?\)"),
        ({}, {"format": "hetu_fx.profile/2"}, "this version reads 'hetu_fx.profile/1' only"),
        ({}, {"times": [{"kind": "x", "tensor_parallel": 1, "a": 0, "b": 0}]}, r"times\[0\]: .* a = b = 0"),
        ({}, {"times": [{"kind": "x", "tensor_parallel": 0, "a": 1, "b": 0}]}, "tensor_parallel 0\nhint: give a"),
        ({}, {"times": [{"kind": "x", "tensor_parallel": 1, "b": 1}]}, "'a' is missing\nhint: give a number"),
        ({}, {"alpha": [{"kind": "x", "factors": {"two": 1}}]}, r"'factors' has keys \['two'\]\nhint: give whole"),
        ({}, {"alpha": [{"kind": "x", "factors": {"2": 0}}]}, r"factors\[2\] 0.0\nhint: give a finite number above 0"),
        ({}, {"alpha": [{"kind": "x", "factors": {}}]}, r"degrees \[\]\nhint: give one at least"),
        ({}, {"sequences": {"0": 1}}, "give tokens from 1"),
        ({}, {"sequences": {"5": -1}}, r"sequences has \[5\] -1.0"),
        ({}, {"other_lengths": [{"tokens_per_row": 4, "rows": 1}]}, "give one model"),
    ],
)
def test_a_bad_profile_is_refused_with_its_place(program: dict[str, Any], others: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        small(program, **others)


def test_what_stands_twice_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"times: \('T4', 1\) are there twice"):
        replace(FULL, times=(*FULL.times, BlockTime("T4", 1, 1.0, 1.0)))
    with pytest.raises(ProfileError, match="lengths of a row: 64 are there twice"):
        replace(FULL, other_lengths=((64, COSTS),))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot read .*no\.json"):
        Profile.read(tmp_path / "no.json")
