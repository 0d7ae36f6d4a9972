"""resolve picks the cheapest fitting communication, and its steps mean what the annotations say."""

import numpy as np
import pytest
import torch

from hetu_fx.annotations.annotation import cotangent, parse_annotation
from hetu_fx.annotations.states import Duplicate, Partial, Sharding, Split
from hetu_fx.comm_ops.plans.cost import EqualLinks
from hetu_fx.comm_ops.resolve.edge import ReshardEdge
from hetu_fx.comm_ops.resolve.resolve import (
    Refusal,
    RefusedError,
    SplitLevel,
    across_groups,
    along_axes,
    refine,
    resolve,
    restore,
    same_top,
)
from hetu_fx.errors import ResolveError
from tests.comm_ops.changes import EDGES
from tests.oracles.annotation_reference import shard, unshard
from tests.oracles.resolution_reference import run, run_adjoint
from tests.oracles.resolution_simulated import simulate


def edge(source, target, shape=(24, 12)):
    return ReshardEdge.plain(parse_annotation(source), parse_annotation(target), shape)


@pytest.mark.parametrize(
    ("source", "target", "pairs"),
    [
        ("D(2) over {[0,1] P(2); [2]}", "D(2) over {[0] ; [1]}", False),  # rank 1 would be in both pairs
        ("S(0, 2) over {[0,1] P(2); [2,3] P(2)}", "S(0, 2) over {[2,3] D(2); [0,1] D(2)}", False),
        ("S(0, 2) over {[0,1] P(2); [2,3] P(2)}", "S(0, 2) over {[1,0] D(2); [4]}", True),
        ("S(0, 2) over {[0]; [1]}", "S(0, 2:1) over {[0]; [1]}", False),
        ("D(2) over {[0]; [1]}", "D(3) over {[0]; [1]; [2]}", False),
        ("[0]", "[0]", False),
    ],
)
def test_groups_pair_up_under_one_top_if_no_rank_is_in_two_pairs(source, target, pairs):
    assert same_top(edge(source, target)) is pairs


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("[0,1] S(0, 2)", "[1,0] D(2)"),  # another order
        ("[0,1] S(0, 2)", "[0,1] S(1, 2)"),  # no collective for it
        ("[0-3] S(0, 2) D(2)", "[0-3] D(2) S(0, 2)"),  # the same dim joined and cut
        ("[0-3] S(0, 4:2:2:4)", "[0-3] S(0, 2) D(2)"),  # uneven parts that do not nest
        ("[0-5] D(2) P(3)", "[0-5] D(3) P(2)"),  # axes that do not nest
    ],
)
def test_some_changes_of_a_group_have_no_collectives(source, target):
    assert along_axes(edge(source, target)) is None


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("D(2) over {[0]; [1]}", "S(0, 2) over {[0]; [1]}"),  # no collective for it
        ("P(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(1, 2); [2]}"),  # shardings differ
        ("P(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] P(2); [2]}"),  # summands inside a group
        ("S(0, 2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}"),  # slices change hands
    ],
)
def test_some_changes_of_the_top_have_no_split_collective(source, target):
    assert across_groups(edge(source, target)) is None


def test_a_split_is_cut_in_coarse_and_fine_pieces():
    found = refine([Sharding((Split.even(0, 4),)), Sharding((Duplicate(2), Partial(2)))])
    assert found == [
        (SplitLevel(Split.even(0, 2)), SplitLevel(Split.even(0, 2), (1, 1))),
        (Duplicate(2), Partial(2)),
    ]


def test_uneven_units_are_cut_where_they_factor():
    halves = Sharding((Duplicate(2), Partial(2)))
    found = refine([Sharding((Split(0, (4, 2, 2, 1)),)), halves])
    assert found[0] == (SplitLevel(Split(0, (2, 1))), SplitLevel(Split(0, (2, 1)), (2, 1)))
    assert refine([Sharding((Split(0, (4, 2, 1, 1)),)), halves]) is None
    assert refine([Sharding((Split(0, (2, 1, 0, 0)),)), halves])[0][0].split.units == (1, 0)


def test_axes_that_do_not_nest_are_not_refined():
    assert refine([Sharding((Duplicate(2), Partial(3))), Sharding((Duplicate(3), Partial(2)))]) is None


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(),
        Sharding((Split(1, (4, 2, 2, 1), 3, 5),)),
        Sharding((Split(0, (6, 3, 2, 1)),)),
        Sharding((Duplicate(4),)),
        Sharding((Partial(2), Split.even(0, 2))),
    ],
)
def test_what_is_refined_is_restored(sharding):
    ways = sharding.ways
    axes = (Duplicate(2), Partial(2)) if ways == 4 else ()
    found = refine([sharding, Sharding(axes)])
    assert restore(found[0]) == sharding


def test_a_single_device_has_no_axes():
    assert refine([Sharding(), Sharding()]) == [(), ()]


SHAPE = (24, 12)


def ops(resolution):
    return [step.op for step in resolution.steps]


def resolved(source, target, shape=SHAPE):
    return resolve(parse_annotation(source), parse_annotation(target), shape)


def check(resolution):
    generator = np.random.default_rng(0)
    value = generator.standard_normal(resolution.shape)
    source, target = resolution.source, resolution.target
    locals_ = shard(value, source, generator.standard_normal)
    played = simulate(resolution, {rank: torch.from_numpy(x) for rank, x in locals_.items()})
    for results in (run(resolution, locals_), {rank: played[rank].numpy() for rank in target.ranks}):
        for copy in range(len(target.copy_sets)):
            np.testing.assert_allclose(unshard(results, target, value.shape, copy), value)
        if not target.has_partial:
            for rank, array in shard(value, target).items():
                np.testing.assert_allclose(results[rank], array)


CASES = [
    ("[0-3] S(0, 2) D(2)", "[0-3] S(0, 2) D(2)", []),
    ("[0,1] P(2)", "[0,1] D(2)", ["all_reduce"]),
    ("[0,1] P(2)", "[0,1] S(1, 2:1)", ["reduce_scatter"]),
    ("[0,1] S(1, 2:1, 1x_x2)", "[0,1] D(2)", ["all_gather"]),
    ("[0-2] S(0, 2:0:1, 2x_x1)", "[0-2] D(3)", ["all_gather"]),
    ("[0,1] D(2)", "[0,1] S(0, 2:1)", ["local_slice"]),
    ("[0-3] D(2) P(2)", "[0-3] S(0, 2) D(2)", ["local_slice", "all_reduce"]),
    ("[0-3] D(4)", "[0-3] S(0, 2) S(1, 2)", ["local_slice", "local_slice"]),
    ("[0-3] S(0, 2) S(1, 2)", "[0-3] D(4)", ["all_gather", "all_gather"]),
    ("[0-3] S(0, 4)", "[0-3] S(0, 2) D(2)", ["all_gather"]),
    ("[0-3] S(0, 2) P(2)", "[0-3] S(0, 4)", ["reduce_scatter"]),
    ("[0-3] S(0, 4:2:2:4)", "[0-3] S(0, 2) D(2)", ["batched_send_receive"]),
    ("[0-3] P(4)", "[0-3] S(0, 4:2) S(1, 2)", ["reduce_scatter", "reduce_scatter"]),
    ("[0-3] S(0, 4)", "[0-3] D(2) S(0, 2)", ["batched_send_receive"]),
    ("[0,1] S(0, 2)", "[0,1] S(1, 2)", ["batched_send_receive"]),
    ("[0,1] S(0, 2)", "[2,3] S(0, 2)", ["batched_send_receive"]),
    ("[0,1] D(2)", "[0,1] P(2)", ["batched_send_receive"]),
    ("D(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] D(2); [2]}", ["all_reduce"]),
    ("D(2) over {[0,1] P(2); [2,3] S(0, 2)}", "D(2) over {[0,1] S(1, 2); [2,3] S(1, 2)}",
     ["reduce_scatter", "batched_send_receive"]),
    ("P(2) over {[0]; [1]}", "D(2) over {[0]; [1]}", ["all_reduce"]),
    ("S(0, 3:1) over {[0,1] P(2); [2]}", "S(0, 3:1) over {[0,1] D(2); [2]}", ["all_reduce"]),
    ("P(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}", ["split_all_reduce"]),
    ("P(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] S(1, 2); [2]}", ["reduce_scatter", "split_all_reduce"]),
    ("P(2) over {[0,1] S(1, 2); [2]}", "S(0, 2:1) over {[0,1] S(1, 2); [2]}", ["split_reduce_scatter"]),
    ("S(0, 2:1) over {[0,1] S(1, 2); [2]}", "D(2) over {[0,1] S(1, 2); [2]}", ["split_all_gather"]),
    ("S(0, 2:1) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}", ["batched_send_receive"]),
    ("P(3) over {[0,1] D(2); [2]; [3-6] D(4)}", "D(3) over {[0,1] D(2); [2]; [3-6] D(4)}",
     ["local_slice", "local_slice", "split_all_reduce", "all_gather", "all_gather"]),
    ("P(2) over {[0,1] P(2); [2,3] S(0, 2)}", "D(2) over {[0,1] D(2); [2,3] S(0, 2)}",
     ["reduce_scatter", "split_all_reduce", "all_gather"]),
    ("P(2) over {[0-2] S(1, 3); [3,4] S(1, 2)}", "D(2) over {[0-2] S(1, 3); [3,4] S(1, 2)}",
     ["split_all_reduce"]),
    # Summands are added up where they are, then sent.
    ("P(2) over {[0,1] P(2); [2]}", "[3,4] S(0, 2)",
     ["reduce_scatter", "split_reduce_scatter", "batched_send_receive"]),
    ("[0-3] P(4)", "[4,5] D(2)", ["reduce_scatter", "batched_send_receive"]),
    # A summand for a summand: nothing is added up.
    ("[0,1] P(2)", "[2,3] P(2)", ["batched_send_receive"] * 2),
    # Groups of one change resolve each in its own way (Hetu v2 section 6.2).
    ("D(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] S(0, 2); [4]}", ["reduce_scatter", "batched_send_receive"]),
    ("S(0, 2:1) over {[0,1] P(2); [2]}", "S(0, 2:1) over {[0,1] D(2); [3,4] S(1, 2)}",
     ["all_reduce", "batched_send_receive"]),
    # Unions of different size.
    ("P(3) over {[0,1] S(0, 2); [2,3] S(0, 2); [4]}", "D(2) over {[5,6] S(0, 2); [7]}",
     ["split_reduce_scatter", "batched_send_receive"]),
    ("D(4) over {[0]; [1]; [2]; [3]}", "D(2) over {[0,1] S(0, 2); [2,3] S(0, 2)}", ["local_slice"]),
    ("S(0, 3:1) over {[0,1] S(1, 2); [2]}", "D(3) over {[0]; [1]; [2]}", ["batched_send_receive"]),
    # ZeRO: every finest slice is shared by the groups, so that each owns several ranges (fact sheet 3.3).
    ("P(2) over {[0,1] S(0, 2); [2]}", "S(0, 2, 2x_x1) over {[0,1] S(0, 2); [2]}", ["split_reduce_scatter"]),
    ("P(2) over {[0-2] S(0, 3); [3,4] S(0, 2)}", "S(0, 2, 6x_x1) over {[0-2] S(0, 3); [3,4] S(0, 2)}",
     ["split_reduce_scatter"]),
    ("S(0, 2, 6x_x1) over {[0-2] S(0, 3); [3,4] S(0, 2)}", "D(2) over {[0-2] S(0, 3); [3,4] S(0, 2)}",
     ["split_all_gather"]),
    # A fused projection: three boxes per device.
    ("[0,1] S(0, 2, 3x_x4)", "[0,1] D(2)", ["all_gather"]),
    ("[0,1] S(0, 2, 3x_x4)", "[0-3] S(0, 4, 3x_x1)", ["batched_send_receive"]),
    ("P(2) over {[0,1] S(0, 2, 3x_x4); [2]}", "D(2) over {[0,1] S(0, 2, 3x_x4); [2]}", ["split_all_reduce"]),
    ("D(2) over {[2]; [0,1] S(0, 2:1)}", "D(2) over {[0]; [1]}", ["batched_send_receive"]),
    ("S(0, 2) over {[0]; [1]}", "[0,1] S(0, 2)", []),
    # Copies of a sum become copies of summands: regions are the same, values are not.
    ("D(2) over {[0,1] P(2); [2,3] P(2)}", "[0-3] D(2) P(2)", ["batched_send_receive"]),
    ("P(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] P(2); [2]}",
     ["reduce_scatter", "split_reduce_scatter", "batched_send_receive"]),
    # The finer cut waits for the coarser one, though slices of other dims come before sums.
    ("[0-3] P(2) D(2)", "[0-3] S(0, 4)", ["reduce_scatter", "local_slice"]),
    ("[0-3] P(2) D(2)", "[0-3] S(0, 2) S(1, 2)", ["local_slice", "reduce_scatter"]),
    # The groups' summands differ, though their sums are equal: no rank may add summands of both.
    ("D(2) over {[0,1] P(2); [2,3] P(2)}", "[0,2,1,3] D(4)",
     ["reduce_scatter", "reduce_scatter", "batched_send_receive"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "expected"), CASES)
def test_each_change_gets_its_steps_and_they_are_right(source, target, expected):
    resolution = resolved(source, target)
    assert ops(resolution) == expected
    check(resolution)


@pytest.mark.parametrize(("source", "target", "gradient"), EDGES)
def test_gradients_come_back_through_every_kind_of_step(source, target, gradient):
    gradient = parse_annotation(gradient)
    resolution = resolve(parse_annotation(source), parse_annotation(target), SHAPE, gradient)
    check(resolution)
    generator = np.random.default_rng(1)
    weight, back = generator.standard_normal(SHAPE), cotangent(resolution.source)
    found = run_adjoint(resolution, shard(weight, gradient, generator.standard_normal))
    for rank, array in shard(weight, back).items():
        np.testing.assert_allclose(found[rank], array, atol=1e-12)


def test_megatrons_edges_have_their_adjoints():
    d, p, s = (parse_annotation(f"[0,1] {state}") for state in ("D(2)", "P(2)", "S(0, 2)"))
    calls = {
        (d, d, p): ("identity", ([0, 1],)),
        (p, d, d): ("all_reduce", ([0, 1], "duplicate")),
        (p, d, p): ("all_reduce", ([0, 1], "partial")),
        (s, d, d): ("all_gather", ([0, 1], 0, [12, 12], 1, 1, "duplicate")),
        (s, d, p): ("all_gather", ([0, 1], 0, [12, 12], 1, 1, "partial")),
        (p, s, s): ("reduce_scatter", ([0, 1], 0, [12, 12], 1, 1)),
    }
    for (source, target, gradient), expected in calls.items():
        (call,) = resolve(source, target, SHAPE, gradient).calls(1)
        assert (call.op, call.args) == expected
    assert resolve(d, d, SHAPE, d).calls(0) == ()


def test_symbolic_dims_pass_where_they_are_whole():
    resolution = resolved("[0,1] S(2, 2:1)", "[0,1] D(2)", (None, None, 6))
    assert resolution.calls(0)[0].args == ([0, 1], 2, [4, 2], 1, 1, "duplicate")
    with pytest.raises(ResolveError, match="symbolic"):
        resolved("[0,1] S(0, 2)", "[0,1] D(2)", (None, 6))
    with pytest.raises(ResolveError, match="not known"):
        resolution.bytes(4)


def test_peers_of_an_axis_are_an_interval_apart():
    resolution = resolved("[4-7] S(0, 2) D(2)", "[4-7] D(4)")
    assert [resolution.calls(rank)[0].args[0] for rank in range(4, 8)] == [[4, 6], [5, 7], [4, 6], [5, 7]]
    assert resolution.calls(0) == ()


def test_bytes_are_counted_on_the_wire():
    assert resolved("[0-3] P(4)", "[0-3] D(4)", (8,)).bytes(4) == 2 * 3 * 8 * 4
    assert resolved("[0-3] S(0, 2) D(2)", "[0-3] D(4)", (8,)).bytes(4) == 2 * 8 * 4
    assert resolved("[0]", "[1]", (8,)).bytes(4) == 32
    assert resolved("[0,1] D(2)", "[0,1] S(0, 2)", (8,)).bytes(4) == 0


def test_a_resolution_explains_itself():
    text = str(resolved("[0,1] P(2)", "[0,1] D(2)", (8, None)))
    assert text == "[0,1] P(2) -> [0,1] D(2) of 8x?\n  all_reduce: [0,1] P(2) -> [0,1] D(2)"


class TwoNodes(EqualLinks):
    """Four ranks in each node; ten times faster inside."""

    def bytes_per_second(self, a, b):
        return 1e6 if a // 4 == b // 4 else 1e5

    def latency_seconds(self, a, b):
        return 1e-5

    def node_of(self, rank):
        return rank // 4


# With a topology seconds decide. Each: source, target, steps by bytes alone, steps by seconds.
MEASURED = [
    # The slow link carries every entry once (H2's send, then gather).
    ("[0,1] S(0, 2)", "[4-7] D(4)", ["batched_send_receive"], ["batched_send_receive", "all_gather"]),
    ("[0]", "[0-7] D(8)", ["batched_send_receive"], ["batched_send_receive", "all_gather"]),
    ("[0-3] P(4)", "[4-7] D(4)", ["reduce_scatter", "batched_send_receive"],
     ["reduce_scatter", "batched_send_receive", "all_gather"]),
    # Unions of different size, which the paper always moves.
    ("P(3) over {[0,1] S(0, 2); [2,3] S(0, 2); [4]}", "D(2) over {[5,6] S(0, 2); [7]}",
     ["split_reduce_scatter", "batched_send_receive"],
     ["split_reduce_scatter", "batched_send_receive", "split_all_gather"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "by_bytes", "by_seconds"), MEASURED)
def test_measured_links_decide(source, target, by_bytes, by_seconds):
    edge, shape, topology = (parse_annotation(source), parse_annotation(target)), (96, 96), TwoNodes()
    cheap, fast = resolve(*edge, shape), resolve(*edge, shape, topology=topology, itemsize=4)
    assert (ops(cheap), ops(fast)) == (by_bytes, by_seconds)
    assert cheap.bytes(4) <= fast.bytes(4)
    assert fast.seconds(4, topology) < cheap.seconds(4, topology)
    check(cheap)
    check(fast)


@pytest.mark.parametrize(
    ("source", "target", "gradient", "shape", "reason"),
    [
        ("[0-2] S(0, 3)", "[0-2] D(3)", "[0-2] D(3)", (8,), Refusal.SIZE),
        ("[0-2] D(3)", "[0-2] S(1, 3, 2x_x1)", "[0-2] S(1, 3, 2x_x1)", (2, 9), Refusal.SIZE),
        ("[0,1] S(0, 2)", "[0,1] D(2)", "[0,1] D(2)", (None, 6), Refusal.SYMBOLIC),
        ("S(0, 2) over {[0]; [1]}", "[0,1] D(2)", "[0,1] D(2)", (None, 6), Refusal.SYMBOLIC),
        ("[0,1] S(1, 2)", "[0,1] D(2)", "[0,1] D(2)", (8,), Refusal.NO_SUCH_DIM),
        ("[0,1] S(0, 2)", "[0,1] D(2)", "[0,1] S(0, 2)", (8,), Refusal.GRADIENT),
    ],
)
def test_what_is_refused_gives_a_reason_of_the_list(source, target, gradient, shape, reason):
    with pytest.raises(RefusedError) as caught:
        resolve(parse_annotation(source), parse_annotation(target), shape, parse_annotation(gradient))
    assert caught.value.reason is reason
    assert isinstance(caught.value, ResolveError)


def test_no_reason_is_on_the_list_for_nothing():
    (marker,) = (m for m in test_what_is_refused_gives_a_reason_of_the_list.pytestmark if m.name == "parametrize")
    assert {case[-1] for case in marker.args[1]} == set(Refusal)


def test_what_does_not_fit_is_refused_with_both_annotations():
    with pytest.raises(ResolveError, match=r"\[0-2\] S\(0, 3\) -> .* of 8: cannot split dim 0 of size 8"):
        resolved("[0-2] S(0, 3)", "[0-2] D(3)", (8,))
    s, d = parse_annotation("[0,1] S(0, 2)"), parse_annotation("[0,1] D(2)")
    with pytest.raises(ResolveError, match="cannot annotate the gradient"):
        resolve(s, d, (8,), s)
