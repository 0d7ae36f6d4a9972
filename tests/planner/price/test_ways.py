import pytest

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.price import ways
from hetu_fx.planner.price.ways import Bucket, HomeWay, Ways, buckets, weight_rings
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=4, rows=8)
TWO_NODES = paper(1e3, 1e3, 1e3, 1e3, nodes="aabb", inter=Link(1e8))


def replicas(*stages: tuple[int, ...]) -> Plan:
    return Plan(tuple(Pipeline((Stage(devices, blocks=4),)) for devices in stages))


def staged(*pipelines: tuple[tuple[int, int], ...]) -> Plan:
    made = (Pipeline(tuple(Stage((rank,), blocks=blocks) for rank, blocks in stages)) for stages in pipelines)
    return Plan(tuple(made))


def test_rings_that_leave_a_node_share_its_link() -> None:
    stages = [Stage((0, 1)), Stage((2, 3))]
    assert weight_rings(stages) == [(0, 2), (1, 3)]
    way = HomeWay(stages, COSTS, TWO_NODES, 1)
    size = COSTS.whole.parameter_bytes
    assert way.share(0, 4) * way.loads["out of node", 0] == pytest.approx(size / 2 / 1e8)
    assert way.seconds("gradients", 0, 4) == pytest.approx(size / 2 / 1e8, rel=0.01)


@pytest.mark.parametrize(("homes", "times"), [((), 1), ((1, 0, 1, 0), 1), ((3, 0, 1, 0), 1.5), ((1, 0, 0, 0), 2)])
def test_who_has_least_at_home_gets_the_most(homes: tuple[int, ...], times: float) -> None:
    stages = [Stage((0,)), Stage((2,))]
    even, own = (HomeWay(stages, COSTS, TWO_NODES, 1, given).line("gather", 0, 4) for given in ((), homes))
    assert own == pytest.approx((even.fixed, times * even.slope))


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


def test_stages_go_at_the_same_time_and_what_one_device_holds_one_after_the_other() -> None:
    cluster = paper(1, 1, 1, 1)
    apart = Ways(staged(((0, 2), (1, 2)), ((2, 2), (3, 2))), COSTS, cluster).ends("gradients")
    assert apart.seconds == max(apart.by_device.values())
    crossed = Ways(staged(((0, 1), (1, 3)), ((2, 3), (3, 1))), COSTS, cluster).ends("gradients")
    assert crossed.by_device[1] > apart.by_device[1]
    assert crossed.seconds >= max(crossed.by_device.values())


def test_nothing_is_gathered_where_all_keep_all() -> None:
    plan = Plan(replicas((0,), (1,)).pipelines, zero=0)
    assert Ways(plan, COSTS, paper(1, 1)).ends("gather").seconds == 0.0
    assert Ways(replicas((0,)), COSTS, paper(1)).ends("gradients").seconds == 0.0


def test_a_ring_is_priced_once_for_all_that_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = []

    def counted(num_bytes: float, ranks: tuple[int, ...], *others: object) -> tuple[float, float]:
        priced.append(ranks)
        return 0.0, 0.0

    monkeypatch.setattr(ways, "sync_seconds", counted)
    Ways(Plan.data_parallel(range(8)).with_blocks(4), COSTS, paper(*[1] * 8)).ends("gradients")
    assert priced == [tuple(range(8))] * 2  # without bytes, and with them


def test_devices_that_links_know_no_difference_of_are_priced_by_one_ring_and_each_by_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priced = set()

    def counted(num_bytes: float, ranks: tuple[int, ...], *others: object) -> tuple[float, float]:
        priced.add((num_bytes, ranks))
        return 0.0, 0.0

    monkeypatch.setattr(ways, "sync_seconds", counted)
    uneven = Plan(tuple(Pipeline((Stage(devices, (3, 1), 4),)) for devices in ((0, 1), (2, 3))))
    for speeds, rings in (((1, 1, 1, 1), {(0, 2)}), ((1, 2, 1, 1), {(0, 2), (1, 2)})):
        priced.clear()
        Ways(uneven, COSTS, paper(*speeds)).ends("gradients")
        assert {ring for _, ring in priced} == rings
        whole = COSTS.between(0, 4)
        assert {size for size, _ in priced} >= {whole.parameter_bytes_at(0.75), whole.parameter_bytes_at(0.25)}
