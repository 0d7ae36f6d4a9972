import pytest

from hetu_fx.cluster.cluster import Link
from hetu_fx.planner.simulate.simulate import simulate
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.show.timeline import chrome_trace
from tests.planner.examples import paper, transformer

SLOW = Link(2e7, 1e-5)


def staged(*pipelines: tuple[int, ...]) -> Plan:
    return Plan(tuple(Pipeline(tuple(Stage((rank,)) for rank in ranks), micro_batches=4) for ranks in pipelines))


def test_a_step_says_what_is_hidden_and_what_is_lost_and_how_busy_links_are() -> None:
    cluster, costs = paper(*[1] * 4, nodes="abab", inter=SLOW), transformer(rows=16)
    step = simulate(staged((0, 1), (2, 3)), costs, cluster)
    parts = step.one_by_one_seconds - step.hidden_seconds + step.lost_seconds
    assert parts == pytest.approx(step.seconds)
    assert step.lost_seconds > 0
    assert step.links[0].share <= 1.0
    assert max(use.lost for use in step.uses.values()) > 0
    assert {one.link for one in step.links} >= {"out of node 0", "into node 1"}
    assert "lost by sharing links" in str(step)
    names = {event["name"] for event in chrome_trace([step.timeline])["traceEvents"]}
    assert "out of node 0 is busy" in names


def test_the_link_of_a_node_carries_what_all_its_devices_send() -> None:
    cluster, costs = paper(*[1] * 4, nodes="abab", inter=SLOW), transformer(rows=16)
    step = simulate(staged((0, 1), (2, 3)), costs, cluster)
    out = next(use for use in step.links if use.link == "out of node 0")
    crossing = sum(count for (a, b), count in step.link_bytes.items() if a in (0, 2) and b in (1, 3))
    assert out.bytes == pytest.approx(crossing)
    assert out.seconds == pytest.approx(crossing / SLOW.bytes_per_second, rel=0.01)
