import pytest

from hetu_fx.errors import ProfileError
from hetu_fx.planner.lengths import costs_at
from hetu_fx.planner.program import ProgramCosts
from tests.planner.examples import transformer


def at(length: int) -> ProgramCosts:
    return transformer(length=length)


def test_three_lengths_tell_every_other_one() -> None:
    known = {length: at(length) for length in (32, 64, 256)}
    for length in (1, 48, 200, 1000):
        told, counted = costs_at(known, length).whole, at(length).whole
        assert told.flops == pytest.approx(counted.flops)
        assert told.activation_bytes == pytest.approx(counted.activation_bytes)
        assert (told.parameter_bytes, told.num_ops) == (counted.parameter_bytes, counted.num_ops)
        assert costs_at(known, length).boundary_bytes == pytest.approx(at(length).boundary_bytes)


def test_one_length_tells_others_in_proportion() -> None:
    told = costs_at({64: at(64)}, 32)
    assert told.whole.flops == pytest.approx(at(64).whole.flops / 2)
    assert told.whole.parameter_bytes == at(64).whole.parameter_bytes


def test_a_known_length_is_taken_as_it_is() -> None:
    costs = at(64)
    assert costs_at({64: costs, 32: at(32), 128: at(128)}, 64) is costs


def test_without_a_length_nothing_can_be_told() -> None:
    with pytest.raises(ProfileError, match="give tokens_per_row"):
        costs_at({}, 5)
