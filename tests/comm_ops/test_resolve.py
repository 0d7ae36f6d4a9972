"""resolve picks the cheapest fitting communication, and its steps mean what the annotations say."""

import numpy as np
import pytest
import torch

from hetu_fx.annotations.reference import shard, unshard
from hetu_fx.annotations.text import parse_annotation
from hetu_fx.comm_ops.resolve import resolve, resolve_edge
from hetu_fx.comm_ops.simulated import simulate
from hetu_fx.errors import ResolveError

SHAPE = (24, 12)


def ops(resolution):
    return [step.op for step in resolution.steps]


def resolved(source, target, shape=SHAPE):
    return resolve(parse_annotation(source), parse_annotation(target), shape)


def check(resolution):
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(resolution.shape, generator=generator, dtype=torch.float64)
    source, target = resolution.source, resolution.target
    locals_ = shard(value.numpy(), source, np.random.default_rng(0).standard_normal)
    results = simulate(resolution, {rank: torch.from_numpy(x) for rank, x in locals_.items()})
    assert set(results) >= set(target.ranks)
    for copy in range(len(target.copy_sets)):
        arrays = {rank: results[rank].numpy() for rank in target.ranks}
        torch.testing.assert_close(torch.from_numpy(unshard(arrays, target, tuple(value.shape), copy)), value)
    if not target.has_partial:
        for rank, array in shard(value.numpy(), target).items():
            torch.testing.assert_close(results[rank], torch.from_numpy(array))


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
     ["split_all_reduce"]),
    ("P(2) over {[0-2] S(1, 3); [3,4] S(1, 2)}", "D(2) over {[0-2] S(1, 3); [3,4] S(1, 2)}",
     ["split_all_reduce"]),
    ("P(2) over {[0,1] P(2); [2]}", "[3,4] S(0, 2)", ["batched_send_receive"]),
    ("D(2) over {[2]; [0,1] S(0, 2:1)}", "D(2) over {[0]; [1]}", ["batched_send_receive"]),
    ("S(0, 2) over {[0]; [1]}", "[0,1] S(0, 2)", []),
    # The finer cut waits for the coarser one, though slices of other dims come before sums.
    ("[0-3] P(2) D(2)", "[0-3] S(0, 4)", ["reduce_scatter", "local_slice"]),
    ("[0-3] P(2) D(2)", "[0-3] S(0, 2) S(1, 2)", ["local_slice", "reduce_scatter"]),
    # The groups' summands differ, though their sums are equal: no rank may add summands of both.
    ("D(2) over {[0,1] P(2); [2,3] P(2)}", "[0,2,1,3] D(4)", ["batched_send_receive"]),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "expected"), CASES)
def test_each_change_gets_its_steps_and_they_are_right(source, target, expected):
    resolution = resolved(source, target)
    assert ops(resolution) == expected
    check(resolution)


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
        (call,) = resolve_edge(source, target, gradient, SHAPE).calls(1)
        assert (call.op, call.args) == expected
    assert resolve_edge(d, d, d, SHAPE).calls(0) == ()


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


def test_what_does_not_fit_is_refused_with_both_annotations():
    with pytest.raises(ResolveError, match=r"\[0-2\] S\(0, 3\) -> .* of 8: cannot split dim 0 of size 8"):
        resolved("[0-2] S(0, 3)", "[0-2] D(3)", (8,))
    s, d = parse_annotation("[0,1] S(0, 2)"), parse_annotation("[0,1] D(2)")
    with pytest.raises(ResolveError, match="cannot annotate the gradient"):
        resolve_edge(s, d, s, (8,))
