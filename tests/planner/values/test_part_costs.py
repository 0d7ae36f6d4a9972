import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.values.part_costs import PartCosts


def test_a_share_divides_only_what_is_cut() -> None:
    assert [PartCosts(10, 8).flops_at(share) for share in (0.0, 0.5, 1.0)] == [2, 6, 10]


def test_what_shares_the_sequence_is_cut_besides_what_is_split() -> None:
    part = PartCosts(activation_bytes=8, split_activation_bytes=4, sequence_activation_bytes=2)
    assert [c.activation_bytes_at(0.5) for c in (part, part.in_sequence)] == [6, 5]


def test_work_is_what_grows_with_rows_and_is_not_kept() -> None:
    part = PartCosts(flops=6, split_flops=2, traffic_bytes=4, activation_bytes=3, parameter_bytes=8, num_ops=5)
    assert part.work == PartCosts(flops=6, split_flops=2, traffic_bytes=4)
    assert part.work.times(1.5) == PartCosts(flops=9, split_flops=3, traffic_bytes=6)


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="split_flops is 2, but flops is 1\nhint: give 0 to 1"):
        PartCosts(flops=1, split_flops=2)
    with pytest.raises(PlanError, match=r"sequence_traffic_bytes is 2, but 1.* are not split\nhint: give no more"):
        PartCosts(traffic_bytes=3, split_traffic_bytes=2, sequence_traffic_bytes=2)
