"""The reference sees what is wrong with a resolution, and plays every op as its record promises."""

from dataclasses import replace

import numpy as np
import pytest

from hetu_fx.annotations.annotation import parse_annotation
from hetu_fx.comm_ops.ops.table import COMM_OPS
from hetu_fx.comm_ops.resolve.resolution import OpCall
from hetu_fx.comm_ops.resolve.resolve import resolve
from tests.oracles.annotation_reference import shard
from tests.oracles.resolution_reference import run, run_adjoint
from tests.oracles.traffic import adjoint_calls

VALUE = np.arange(48.0).reshape(12, 4)


def resolved(source, target):
    return resolve(parse_annotation(source), parse_annotation(target), VALUE.shape)


def test_values_go_through_and_back():
    resolution = resolved("P(2) over {[0,1] P(2); [2]}", "[3] ")
    assert [step.op for step in resolution.steps][-1] == "batched_send_receive"
    held = shard(VALUE, resolution.source, np.random.default_rng(0).standard_normal)
    np.testing.assert_allclose(run(resolution, held)[3], VALUE)
    back = run_adjoint(resolution, {3: VALUE})
    assert sorted(back) == [0, 1, 2]
    assert all(np.allclose(gradient, VALUE) for gradient in back.values())


def test_a_missing_step_is_seen():
    resolution = resolved("[0-3] P(4)", "[4,5] D(2)")
    held = shard(VALUE, resolution.source, np.random.default_rng(0).standard_normal)
    with pytest.raises(KeyError):
        run(replace(resolution, steps=resolution.steps[:1]), held)
    swapped = replace(resolution, steps=resolution.steps[::-1])
    with pytest.raises((KeyError, IndexError, ValueError)):
        run(swapped, held)


def test_a_rank_that_another_forgets_is_not_written():
    resolution = resolved("[0,1] S(0, 2)", "[2]")
    (step,) = resolution.steps
    other = replace(step, target=parse_annotation("[3]"))
    with pytest.raises(KeyError):
        run(replace(resolution, steps=(other,)), shard(VALUE, resolution.source))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (OpCall("identity", ([0, 1],)), ("all_reduce", [0, 1], "duplicate")),
        (OpCall("all_reduce", ([0, 1], "partial")), ("all_reduce", [0, 1], "partial")),
        (OpCall("local_slice", ([0, 1], 0, [6, 6], 1, 1)), ("all_gather", [0, 1], 0, [6, 6], 1, 1, "duplicate")),
        (OpCall("all_gather", ([0, 1], 0, [6, 6], 1, 1, "partial")), ("reduce_scatter", [0, 1], 0, [6, 6], 1, 1)),
        (OpCall("batched_send_receive", ("[0] -> [1] of 4", "[1] -> [0] of 4")),
         ("batched_send_receive", "[1] -> [0] of 4", "")),
    ],
)  # fmt: skip
def test_the_adjoint_of_a_call_is_read_from_its_record(call, expected):
    (found,) = adjoint_calls(call)
    assert (found.op, *found.args)[: len(expected)] == expected


def test_the_adjoint_of_a_sum_of_copies_is_nothing():
    assert adjoint_calls(OpCall("all_reduce", ([0, 1], "duplicate"))) == ()


def test_every_op_is_played():
    edges = [
        ("[0-3] D(4)", "[0-3] S(0, 2) D(2)", "[0-3] S(0, 2) P(2)"),
        ("[0-3] P(2) S(0, 2)", "[0-3] D(4)", "[0-3] P(4)"),
        ("[0,1] P(2)", "[0,1] S(0, 2)", "[0,1] S(0, 2)"),
        ("P(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}"),
        ("P(2) over {[0,1] S(0, 2); [2]}", "S(1, 2) over {[0,1] S(0, 2); [2]}", "S(1, 2) over {[0,1] S(0, 2); [2]}"),
        ("S(1, 2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}", "P(2) over {[0,1] S(0, 2); [2]}"),
        ("[0]", "[1]", "[1]"),
    ]
    played = set()
    for texts in edges:
        source, target, gradient = map(parse_annotation, texts)
        resolution = resolve(source, target, VALUE.shape, gradient)
        played |= {step.op for step in resolution.steps}
        run(resolution, shard(VALUE, source))
        run_adjoint(resolution, shard(VALUE, gradient))
    # These take the place of two of them where a dim has sizes that only the run tells (layouts/test_exchange.py).
    assert played == set(COMM_OPS) - {"all_to_all", "repartition"}
