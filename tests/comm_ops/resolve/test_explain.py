"""explain says what a change is, who meets whom, what every link carries, and how long it takes."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.cluster.cluster import Cluster, Device, Link
from hetu_fx.comm_ops.resolve.explain import explain
from hetu_fx.comm_ops.resolve.resolve import resolve
from hetu_fx.errors import ResolveError
from tests.oracles.annotation_samples import random_pair

CLUSTER = Cluster(
    tuple(Device(rank, "cpu", str(rank // 4), 1e9, 1 << 30) for rank in range(12)),
    intra=Link(1e9, 1e-5),
    inter=Link(1e8, 1e-4),
)


def explained(source, target, shape=(24, 12), topology=None):
    return explain(resolve(parse_annotation(source), parse_annotation(target), shape), topology)


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        ("[0,1] D(2)", "[0,1] D(2)", "identity"),
        ("S(0, 2) over {[0]; [1]}", "[0,1] S(0, 2)", "identity"),
        ("[0,1] P(2)", "[0,1] D(2)", "bottom"),
        ("D(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] D(2); [2]}", "bottom"),
        ("P(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}", "top"),
        ("P(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] S(1, 2); [2]}", "bottom then top"),
        ("[0,1] S(0, 2)", "[2,3] S(1, 2)", "BSR"),
        ("[0-3] P(4)", "[4,5] D(2)", "bottom then BSR"),
        ("D(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] S(0, 2); [4]}", "bottom beside BSR"),
        ("P(3) over {[0,1] D(2); [2]; [3-6] D(4)}", "D(3) over {[0,1] D(2); [2]; [3-6] D(4)}",
         "bottom then top then bottom"),
    ],
)  # fmt: skip
def test_the_class_names_the_tiers(source, target, kind):
    assert explained(source, target).kind == kind


def test_the_text_has_groups_bytes_links_and_seconds():
    assert str(explained("[0-3] P(4)", "[4,5] D(2)", (4, 2), CLUSTER)).splitlines()[:6] == [
        "[0-3] P(4) -> [4,5] D(2) of 4x2",
        "class: bottom then BSR",
        "step                  tier    groups         bytes  seconds",
        "reduce_scatter        bottom  [0,1,2,3]      96     3e-05",
        "batched_send_receive  BSR     [0,1,2,3,4,5]  64     0.000801",
        "links: 0->1 24, 0->4 8, 0->5 8, 1->2 24, 1->4 8, 1->5 8, 2->3 24, 2->4 8, 2->5 8, 3->0 24, 3->4 8, 3->5 8",
    ]  # fmt: skip


def test_nothing_to_do_is_short():
    assert str(explained("[0]", "[0]")) == "[0] -> [0] of 24x12\nclass: identity\nbytes: 0"


def test_many_links_and_groups_are_summed_up():
    text = str(explained("[0-11] S(0, 12)", "[0-11] S(1, 12)"))
    assert "108 more 864" in text
    assert "and 4 more" in str(explain(resolve(*pairs(24), (24,))))


def pairs(count):
    source = parse_annotation(f"[0-{count - 1}] S(0, {count // 2}) P(2)")
    return source, parse_annotation(f"[0-{count - 1}] S(0, {count // 2}) D(2)")


def test_symbolic_sizes_have_no_bytes():
    with pytest.raises(ResolveError, match="not known"):
        explained("[0,1] P(2)", "[0,1] D(2)", (None, 4))


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_any_change_is_explained_and_its_links_carry_all_bytes(seed, measured):
    source, target = random_pair(Random(seed), range(12), (24, 4, 6))
    topology = CLUSTER if measured else None
    found = explain(resolve(source, target, (24, 4, 6), topology=topology), CLUSTER, itemsize=2)
    assert sum(found.links.values()) == pytest.approx(found.num_bytes)
    assert sum(step.num_bytes for step in found.steps) == found.num_bytes
    assert all(a != b for a, b in found.links)
    assert (found.kind == "identity") == (not found.steps)
    assert found.seconds >= max((step.seconds for step in found.steps), default=0)
    assert str(found).count("\n") >= 2
