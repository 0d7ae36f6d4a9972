from dataclasses import replace

import pytest

from benchmarks.cases.published_hydraulis import FILLING_TOKENS, MEMORY, SCHEMES, TIMES
from hetu_fx.errors import PlanError
from hetu_fx.planner.search.hydraulis.pool import ALIGNMENT
from tests.oracles.hydraulis_memory import ModelShape, OptimizerStrategy, fitting_schemes

PUBLISHED = {
    (1, 4): 1920,
    (2, 2): 3968,
    (2, 4): 6272,
    (2, 6): 7040,
    (4, 1): 7808,
    (4, 2): 12416,
    (4, 4): 14592,
    (4, 6): 15360,
    (8, 1): 21888,
    (8, 2): 25856,
    (8, 3): 27264,
    (8, 4): 27904,
    (16, 1): 43520,
}


@pytest.mark.parametrize(("key", "length"), PUBLISHED.items())
def test_the_longest_row_is_the_published_one(key: tuple[int, int], length: int) -> None:
    assert MEMORY.max_length(*key) == length


def test_schemes_that_do_not_fit_are_left_out() -> None:
    assert MEMORY.max_length(1, 2) == MEMORY.max_length(2, 1) == 0
    assert {key: scheme.max_length for key, scheme in SCHEMES.items()} == PUBLISHED
    assert {scheme.filling_tokens for key, scheme in SCHEMES.items() if key[0] == 8} == {FILLING_TOKENS[8]}


def test_a_row_one_block_longer_does_not_fit() -> None:
    free = MEMORY.device_bytes - MEMORY.reserve_bytes - MEMORY.runtime_bytes
    for key, length in PUBLISHED.items():
        kept, per_token = MEMORY.kept_bytes(*key), MEMORY.bytes_per_token(key[0])
        assert kept + length * per_token <= free < kept + (length + ALIGNMENT) * per_token


def test_more_replicas_keep_less_of_the_optimizer() -> None:
    wider = replace(MEMORY, home=replace(MEMORY.home, replicas=16))
    assert wider.kept_bytes(8, 1) < MEMORY.kept_bytes(8, 1)
    assert wider.max_length(8, 1) > MEMORY.max_length(8, 1)


def test_a_degree_without_constant_is_refused() -> None:
    with pytest.raises(PlanError, match=r"degree 32; known are \[1, 2, 4, 8, 16\]"):
        fitting_schemes({(32, 1): TIMES[16, 1]}, MEMORY)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="layers 0"):
        ModelShape(0, 1, 1)
    with pytest.raises(PlanError, match="replicas 0"):
        OptimizerStrategy(0, 1, 1)
    with pytest.raises(PlanError, match=r"\[4\] -1"):
        replace(MEMORY, activation_bytes={4: -1})
    with pytest.raises(PlanError, match="reserve_bytes -1"):
        replace(MEMORY, reserve_bytes=-1)
