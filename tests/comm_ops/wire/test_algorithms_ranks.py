"""Every form of a collective gives what the flat one gives, on four gloo ranks as nodes of two, or of three and one."""

import random

import numpy as np
import pytest
import torch

from hetu_fx.annotations.annotation import cotangent, parse_annotation
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.resolve.resolve import resolve
from tests.oracles.annotation_reference import shard

NODES = {"two and two": "aabb", "three and one": "aaab", "one, two, one": "abbc", "strided": "abab"}
FORMS = [(nodes, "two_level") for nodes in NODES.values()] + [("aabb", "padded")]
UNIONS = "{[0,1] S(1, 2:1); [2,3] D(2)}"
# source, target, whether the forward adds nothing up, whether the backward does not
EDGES = [
    ("[0-3] P(4)", "[0-3] D(4)", False, True),
    ("[2,0,3,1] P(4)", "[2,0,3,1] D(4)", False, True),
    ("[0-3] D(4)", "[0-3] S(0, 1:0:2:3)", True, True),
    ("[0-3] P(4)", "[0-3] S(1, 2:1:1:2)", False, True),
    ("[3,1,0,2] P(4)", "[3,1,0,2] S(0, 4, 2x_x1)", False, True),
    ("[0-3] S(0, 4)", "[0-3] D(4)", True, True),
    ("[0-3] S(0, 3:1:0:2)", "[0-3] D(4)", True, True),
    ("[1,3,2,0] S(1, 2:1:2:1, 1x_x2)", "[1,3,2,0] D(4)", True, True),
    ("[0,1] S(0, 2)", "[2,3] D(2)", True, True),
    ("[0,1] S(0, 2:1)", "[1,2,3] D(3)", True, True),
    ("[3] ", "[0-2] D(3)", True, True),
    ("[0-3] P(4)", "[0,1] S(0, 2)", False, True),
    (f"P(2) over {UNIONS}", f"D(2) over {UNIONS}", False, True),
    (f"P(2) over {UNIONS}", f"S(0, 2:1) over {UNIONS}", False, True),
    (f"S(0, 2:1) over {UNIONS}", f"D(2) over {UNIONS}", True, True),
]  # fmt: skip
SHAPE = (24, 12)


def cluster(nodes):
    return Cluster.on_paper([1e9] * 4, nodes=tuple(nodes), intra=Link(1e9, 1e-6), inter=Link(1e7, 1e-4))


def run(calls, x):
    for call in calls:
        x = getattr(torch.ops.hetu, call.op)(x, *call.args)
    return x


def outcome(resolution, lowering, rank):
    """Give value and gradient of one edge."""
    generator = np.random.default_rng(3)
    value, weight = generator.standard_normal(SHAPE), generator.standard_normal(SHAPE)
    held = shard(value, resolution.source, generator.standard_normal)
    incoming = shard(weight, cotangent(resolution.target))
    x = torch.from_numpy(held.get(rank, np.zeros((0, 0)))).requires_grad_()
    y = run(map(lowering.with_algorithm, resolution.calls(rank)), x)
    y.backward(torch.from_numpy(incoming.get(rank, np.zeros(tuple(y.shape)))))
    return y.detach(), x.grad


def compare(found, expected, exact):
    if exact:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def check_forms(rank, world, folder):
    for source, target, *exact in EDGES:
        resolution = resolve(parse_annotation(source), parse_annotation(target), SHAPE)
        plain = outcome(resolution, Lowering(), rank)
        for nodes, choice in FORMS:
            found = outcome(resolution, Lowering(cluster(nodes), choice), rank)
            for ours, flat, same_bits in zip(found, plain, exact, strict=True):
                compare(ours, flat, same_bits)


def check_summed_gradients(rank, world, folder):
    """Edges whose gradients are summands: the adjoints go in the same form."""
    calls = [
        ("identity", ([0, 1, 2, 3],)),
        ("all_reduce", ([0, 1, 2, 3], "partial")),
        ("all_gather", ([0, 1, 2, 3], 0, [3, 3, 3, 3], 1, 1, "partial")),
    ]
    for op, args in calls:
        torch.manual_seed(rank)
        x, weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True), None
        results = []
        for form in ("", "nodes 0,0,1,1 from 0", "nodes 0,0,0,1 from 0", "padded below 1000000"):
            x.grad = None
            y = getattr(torch.ops.hetu, op)(x, *args, form)
            weight = torch.randn_like(y) if weight is None else weight
            y.backward(weight)
            results.append((y.detach(), x.grad))
        for found in results[1:]:
            for ours, flat in zip(found, results[0], strict=True):
                compare(ours, flat, exact=False)


def check_all_ranks_get_the_same_bits_of_a_sum(rank, world, folder):
    torch.manual_seed(rank)
    x = torch.randn(1001)
    y = torch.ops.hetu.all_reduce(x, [0, 1, 2, 3], "duplicate", "nodes 0,0,1,1 from 0")
    every = torch.ops.hetu.all_gather(y, [0, 1, 2, 3], 0, [1001] * 4, 1, 1, "duplicate").view(4, 1001)
    assert all(torch.equal(every[0], other) for other in every)


def check_sizes_from_none_to_many(rank, world, folder):
    generator = random.Random(3)
    for _ in range(20):
        sizes = [generator.randrange(4) for _ in range(world)]
        if sum(sizes) == 0:
            continue
        nodes = ",".join(str(generator.randrange(3)) for _ in range(world))
        x = torch.arange(2.0 * sizes[rank]).view(2, sizes[rank]) + 100 * rank
        ranks = generator.sample(range(world), world)
        sizes_of = [sizes[r] for r in ranks]
        plain, formed = (
            torch.ops.hetu.all_gather(x, ranks, 1, sizes_of, 1, 1, "duplicate", form)
            for form in ("", f"nodes {nodes} from 0")
        )
        assert torch.equal(plain, formed)
        back, formed_back = (
            torch.ops.hetu.reduce_scatter(plain, ranks, 1, sizes_of, 1, 1, form)
            for form in ("", f"nodes {nodes} from 0")
        )
        torch.testing.assert_close(back, formed_back)


@pytest.mark.distributed
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "check",
    [check_forms, check_summed_gradients, check_all_ranks_get_the_same_bits_of_a_sum, check_sizes_from_none_to_many],
    ids=lambda check: check.__name__,
)
def test_on_four_ranks(check, gloo_checks):
    assert gloo_checks(__file__, 4)[check.__name__] == [None] * 4
