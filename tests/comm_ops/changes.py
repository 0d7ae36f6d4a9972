"""Many changes of annotations, whose values and gradients one of several ranks checks against the reference."""

from random import Random

import numpy as np
import torch

from hetu_fx.annotations.annotation import DeviceGroup, cotangent, parse_annotation
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove, plan_moves
from hetu_fx.comm_ops.plans.cost import EqualLinks
from hetu_fx.comm_ops.resolve.resolve import resolve
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.groups import active
from tests.oracles.annotation_reference import shard
from tests.oracles.annotation_samples import random_annotation, random_cotangent, random_pair

SHAPE = (24, 8)

# source, target, cotangent of the target
EDGES = [
    ("[0-3] D(4)", "[0-3] D(4)", "[0-3] P(4)"),
    ("[0-3] P(4)", "[0-3] D(4)", "[0-3] D(4)"),
    ("[0-3] P(4)", "[0-3] D(4)", "[0-3] D(2) P(2)"),
    ("[2,0,1] S(0, 2:0:1, 2x_x2)", "[2,0,1] D(3)", "[2,0,1] D(3)"),
    ("[2,0,1] S(0, 2:0:1, 2x_x2)", "[2,0,1] D(3)", "[2,0,1] P(3)"),
    ("[3,1,2] P(3)", "[3,1,2] S(1, 1:2:1)", "[3,1,2] S(1, 1:2:1)"),
    ("[0-3] S(0, 2) D(2)", "[0-3] S(0, 2) S(1, 2)", "[0-3] S(0, 2) S(1, 2)"),
    ("[0-3] S(0, 4)", "[0-3] D(4)", "[0-3] D(2) P(2)"),
    ("P(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}"),
    ("P(2) over {[0,1] S(0, 2); [2]}", "D(2) over {[0,1] S(0, 2); [2]}", "P(2) over {[0,1] S(0, 2); [2]}"),
    ("P(2) over {[2,0,1] S(1, 1:2:1); [3]}", "S(0, 2:1) over {[2,0,1] S(1, 1:2:1); [3]}",
     "S(0, 2:1) over {[2,0,1] S(1, 1:2:1); [3]}"),
    ("S(0, 2:1) over {[0,1] S(1, 2); [2]}", "D(2) over {[0,1] S(1, 2); [2]}",
     "P(2) over {[0,1] S(1, 2); [2]}"),
    ("S(0, 2:1) over {[0,1] S(1, 2); [2]}", "D(2) over {[0,1] S(1, 2); [2]}",
     "D(2) over {[0,1] S(1, 2); [2]}"),
    ("P(2) over {[0,1] D(2); [2]}", "D(2) over {[0,1] D(2); [2]}", "D(2) over {[0,1] D(2); [2]}"),
    ("D(2) over {[0,1] P(2); [2,3] S(0, 2)}", "D(2) over {[0,1] D(2); [2,3] D(2)}",
     "D(2) over {[0,1] D(2); [2,3] P(2)}"),
    ("[0,1] S(0, 2:1)", "[2,3] S(1, 1:3)", "[2,3] S(1, 1:3)"),
    # Sub-factors whose outer and inner sizes differ.
    ("[0,1] P(2)", "[0,1] S(0, 2, 3x_x2)", "[0,1] S(0, 2, 3x_x2)"),
    ("[0,1] D(2)", "[0,1] S(0, 2, 3x_x2)", "[0,1] S(0, 2, 3x_x2)"),
    ("[0,1] S(0, 2, 3x_x2)", "[0,1] D(2)", "[0,1] P(2)"),
    # Several steps: sums before a move, gathers behind it, groups each in its own way, copies cut up in between.
    ("[0,1] P(2)", "[2,3] D(2)", "[2,3] P(2)"),
    ("[0-3] P(2) D(2)", "[0-3] S(0, 4)", "[0-3] S(0, 4)"),
    ("D(2) over {[0,1] P(2); [2]}", "D(2) over {[0,1] S(0, 2); [3]}", "D(2) over {[0,1] S(0, 2); [3]}"),
    ("P(2) over {[0-2] D(3); [3]}", "D(2) over {[0-2] D(3); [3]}", "P(2) over {[0-2] D(3); [3]}"),
    ("P(2) over {[0,1] P(2); [2]}", "[3] ", "[3]"),
    ("P(2) over {[0,1] S(0, 2); [2]}", "S(0, 2, 2x_x1) over {[0,1] S(0, 2); [2]}",
     "S(0, 2, 2x_x1) over {[0,1] S(0, 2); [2]}"),
    ("[0,1] S(0, 2, 3x_x4)", "[1-3] S(0, 3)", "[1-3] S(0, 3)"),
]  # fmt: skip

GROUPS = [
    None,
    [DeviceGroup((0, 1, 2, 3))],
    [DeviceGroup((3, 0, 2, 1))],
    [DeviceGroup((0, 1)), DeviceGroup((2, 3))],
    [DeviceGroup((0, 2)), DeviceGroup((1,))],
    [DeviceGroup((1, 0, 2)), DeviceGroup((3,))],
]


class TwoNodes(EqualLinks):
    """Two ranks in each node, ten times faster inside."""

    def bytes_per_second(self, a, b):
        return 1e6 if a // 2 == b // 2 else 1e5

    def latency_seconds(self, a, b):
        return 1e-5

    def node_of(self, rank):
        return rank // 2


TOPOLOGIES = (None, TwoNodes())


def random_edges(count: int):
    random = Random(1)
    for number in range(count):
        groups = random.choice(GROUPS)
        source, target = (random_annotation(random, range(4), SHAPE, groups=groups) for _ in range(2))
        if number % 2:
            source, target = random_pair(random, range(4), SHAPE)
        yield source, target, random_cotangent(random, target)


def check_edge(source, target, gradient, topology, rank: int) -> None:
    generator = np.random.default_rng(3)
    value, weight = generator.standard_normal(SHAPE), generator.standard_normal(SHAPE)
    held = shard(value, source, generator.standard_normal)
    incoming = shard(weight, gradient, generator.standard_normal)
    x = torch.from_numpy(held.get(rank, np.zeros((0,) * len(SHAPE)))).requires_grad_()
    y = x
    for call in resolve(source, target, SHAPE, gradient, topology=topology).calls(rank):
        y = getattr(torch.ops.hetu, call.op)(y, *call.args)
    if target.holds(rank) and not target.has_partial:
        assert_close(y.detach(), shard(value, target)[rank], "value")
    if y.requires_grad:
        y.backward(torch.from_numpy(incoming.get(rank, np.zeros(tuple(y.shape)))))
    if source.holds(rank):
        assert_close(x.grad, shard(weight, cotangent(source))[rank], "gradient")


def assert_close(found, expected, what: str) -> None:
    torch.testing.assert_close(found, torch.from_numpy(expected), msg=lambda text: f"{what}: {text}")


def check_moves(rank: int, relays: bool) -> None:
    """Several tensors of several dtypes in one plan."""
    random, generator = Random(5), np.random.default_rng(5)
    pairs = [[random_annotation(random, range(4), SHAPE, partial=False) for _ in range(2)] for _ in range(8)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool] * 2
    values = [torch.from_numpy(generator.integers(0, 9, SHAPE)).to(dtype).float() for dtype in dtypes]
    moves = [TensorMove(s, t, SHAPE, d.itemsize) for (s, t), d in zip(pairs, dtypes, strict=True)]
    plan = plan_moves(moves, node_of=lambda rank: rank // 2, relays=relays)
    like = [torch.empty(0, dtype=dtype) for dtype in dtypes]
    tensors = [
        torch.from_numpy(shard(v.numpy(), s)[rank]).to(d) if s.holds(rank) else None
        for v, (s, _), d in zip(values, pairs, dtypes, strict=True)
    ]
    results = run_moves(plan, tensors, active(), like=like)
    for value, (_, target), result, dtype in zip(values, pairs, results, dtypes, strict=True):
        assert (result is not None) == target.holds(rank)
        if result is not None:
            assert torch.equal(result, torch.from_numpy(shard(value.numpy(), target)[rank]).to(dtype))


def check_all(rank: int) -> None:
    """Check all changes, as one of four ranks."""
    edges = [tuple(map(parse_annotation, texts)) for texts in EDGES] + list(random_edges(150))
    for number, edge in enumerate(edges):
        try:
            check_edge(*edge, TOPOLOGIES[number % 2], rank)
        except Exception:
            print(f"rank {rank}: {' | '.join(map(str, edge))}", flush=True)
            raise
    check_moves(rank, relays=False)
    check_moves(rank, relays=True)
