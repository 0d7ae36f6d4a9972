import pytest

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.price import step
from hetu_fx.planner.price.replica_groups import Columns
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.price.step_end import sync_seconds
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.planner.examples import paper, transformer

COSTS = transformer(layers=4, rows=8)
SLOW = Link(1e6, 1e-3)


def pipeline(*stages: tuple[tuple[int, ...], int]) -> Pipeline:
    return Pipeline(tuple(Stage(devices, blocks=blocks) for devices, blocks in stages))


def test_devices_at_the_same_height_of_equal_pipelines_meet() -> None:
    columns = Columns(Plan((pipeline(((0, 1), 2), ((2, 3), 2)), pipeline(((4, 5), 2), ((6, 7), 2)))), 4)
    assert [columns.of(0, 0, 0), columns.of(0, 0, 1), columns.of(1, 1, 0)] == [(0, 4), (1, 5), (2, 6)]
    assert columns.of(0, 0, 1) is columns.of(1, 0, 1)


def test_a_stage_meets_the_groups_that_hold_its_first_block() -> None:
    plan = Plan((pipeline(((0, 1), 1), ((2,), 3)), pipeline(((3, 4, 5, 6), 4)), pipeline(((7,), 3), ((8,), 1))))
    columns = Columns(plan, 4)
    assert columns.of(0, 0, 1) == (1, 5, 7)
    assert columns.of(0, 1, 0) == (2, 3, 7)
    assert columns.of(2, 1, 0) == (2, 3, 8)
    assert columns.of(1, 0, 3) == (1, 6, 7)


def test_a_stage_without_blocks_stands_in_its_own_column() -> None:
    columns = Columns(Plan((pipeline(((0,), 0), ((1,), 4)), pipeline(((2,), 4)))), 4)
    assert columns.of(0, 0, 0) == (0, 2)
    assert columns.of(0, 1, 0) == (1, 2)


def test_stages_sync_inside_their_node_where_those_that_hold_the_same_stand_there() -> None:
    plan = Plan((pipeline(((0,), 2), ((1,), 2)), pipeline(((2,), 2), ((3,), 2))))
    within, across = (paper(1, 1, 1, 1, nodes=nodes, inter=SLOW) for nodes in ("abab", "aabb"))
    for cluster in (within, across):
        (device,) = (d for d in predict(plan, COSTS, cluster).devices if d.rank == 1)
        held = COSTS.stage(2, 4).parameter_bytes
        assert dict(device.seconds)["gradient_sync"] == sync_seconds(held, (1, 3), cluster, 1)[0]
    assert predict(plan, COSTS, within).seconds < predict(plan, COSTS, across).seconds


def test_a_ring_is_priced_once_for_all_that_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    priced = []

    def counted(num_bytes: float, ranks: tuple[int, ...], *others: object) -> tuple[float, float]:
        priced.append(ranks)
        return 0.0, 0.0

    monkeypatch.setattr(step, "sync_seconds", counted)
    predict(Plan.data_parallel(range(8)), COSTS, paper(*[1] * 8))
    assert priced == [tuple(range(8))]
