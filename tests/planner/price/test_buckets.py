from hetu_fx.planner.price.buckets import Bucket, buckets
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts


def program(*mega_bytes: float) -> ProgramCosts:
    parts = tuple(PartCosts(parameter_bytes=size * (1 << 20)) for size in mega_bytes)
    return ProgramCosts(1, PartCosts(), parts, PartCosts(), (0.0,) * max(0, len(parts) - 1))


def test_buckets_go_from_the_last_block_to_the_first_and_hold_no_more_than_the_runtimes() -> None:
    found = buckets(program(10, 10, 10, 10, 30), [(0, 5), (0, 5)])
    assert found == (Bucket(4, 5, (0, 0)), Bucket(2, 4, (0, 0)), Bucket(0, 2, (0, 0)))


def test_a_bucket_ends_where_other_stages_hold_the_blocks() -> None:
    found = buckets(program(1, 1, 1, 1), [(0, 3, 4), (0, 2, 4)])
    assert found == (Bucket(3, 4, (1, 1)), Bucket(2, 3, (0, 1)), Bucket(0, 2, (0, 0)))


def test_a_program_without_blocks_is_one_bucket() -> None:
    assert buckets(program(), [(0, 0)]) == (Bucket(0, 0, (0,)),)
