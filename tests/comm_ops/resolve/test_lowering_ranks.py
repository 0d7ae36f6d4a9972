"""On four gloo ranks: fake kernels agree with eager ones, and <A x, y> = <x, A^T y> for every op in every form."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetu_fx.annotations.annotation import cotangent, parse_annotation
from hetu_fx.comm_ops.ops.table import COMM_OPS
from hetu_fx.comm_ops.resolve.resolution import AxisStep, MoveStep, TopStep
from hetu_fx.comm_ops.resolve.resolve import resolve
from tests.oracles.annotation_reference import shard, unshard

UNION = "{[0,1] S(1, 2:1); [2]}"
SHAPE = (12, 6)
# source, target, cotangent of the target
EDGES = [
    ("[0-3] D(4)", "[0-3] D(4)", "[0-3] P(4)"),
    ("[0-3] P(4)", "[0-3] D(4)", "[0-3] D(4)"),
    ("[0-3] P(4)", "[0-3] D(4)", "[0-3] P(4)"),
    ("[0-3] S(0, 2:2:1:1)", "[0-3] D(4)", "[0-3] D(4)"),
    ("[0-3] S(0, 2:2:1:1)", "[0-3] D(4)", "[0-3] P(4)"),
    ("[0-3] P(4)", "[0-3] S(1, 2:2:1:1)", "[0-3] S(1, 2:2:1:1)"),
    ("[0-3] D(4)", "[0-3] S(0, 1:0:2:3)", "[0-3] S(0, 1:0:2:3)"),
    (f"P(2) over {UNION}", f"D(2) over {UNION}", f"D(2) over {UNION}"),
    (f"P(2) over {UNION}", f"D(2) over {UNION}", f"P(2) over {UNION}"),
    (f"S(0, 2:1) over {UNION}", f"D(2) over {UNION}", f"D(2) over {UNION}"),
    (f"S(0, 2:1) over {UNION}", f"D(2) over {UNION}", f"P(2) over {UNION}"),
    (f"P(2) over {UNION}", f"S(0, 2:1) over {UNION}", f"S(0, 2:1) over {UNION}"),
    ("[0,1] S(0, 2)", "[2,3] D(2)", "[2,3] P(2)"),
    ("[0-2] P(3)", "[1,3] S(1, 1:2)", "[1,3] S(1, 1:2)"),
]  # fmt: skip
NODES = "0,0,1,1"


def forms(step):
    """Give the forms that fit an op's ranks."""
    ranks = sorted({*step.source.ranks, *step.target.ranks})
    nodes = ",".join(NODES.split(",")[rank] for rank in ranks)
    return ("", f"nodes {nodes} from 0", "padded below 100000")


def steps():
    """List (op name, step, cotangent of its target) of all edges that one step makes."""
    for edge in EDGES:
        source, target, gradient = map(parse_annotation, edge)
        for step in resolve(source, target, SHAPE, gradient).steps:
            yield step, source, target, gradient


def gathered(x):
    """Give every rank's array on every rank."""
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, x.detach().numpy())
    return dict(enumerate(found))


def whole(arrays, annotation):
    return unshard({rank: arrays[rank] for rank in annotation.ranks}, annotation, SHAPE)


def run_step(step, form, x, rank):
    call = step.call(rank)
    return getattr(torch.ops.hetu, call.op)(x, *call.args, form)


def check_adjoints(rank, world, folder):
    """With values and cotangents of the whole tensor: <A x, y> = <x, A^T y>."""
    tried = set()
    for step, source, target, gradient in steps():
        assert (step.source, step.target) == (source, target), "edges must resolve to one step each"
        for form in forms(step):
            generator = np.random.default_rng(5)
            value, weight = generator.standard_normal(SHAPE), generator.standard_normal(SHAPE)
            held = shard(value, source, generator.standard_normal)
            incoming = shard(weight, gradient, generator.standard_normal)
            x = torch.from_numpy(held.get(rank, np.zeros((0, 0)))).requires_grad_()
            if source.holds(rank) or target.holds(rank):
                y = run_step(step, form, x, rank)
                y.backward(torch.from_numpy(incoming.get(rank, np.zeros(tuple(y.shape)))))
            else:
                y, x.grad = x, torch.zeros_like(x)
            forward = whole(gathered(y), target)
            backward = whole(gathered(x.grad), cotangent(source))
            np.testing.assert_allclose((forward * weight).sum(), (value * backward).sum(), rtol=1e-12)
            np.testing.assert_allclose(forward, value, rtol=1e-10, atol=1e-12)
            tried.add(step.op)
    rest = set(COMM_OPS) - {"all_to_all", "repartition"}  # made of two steps, see tests/comm_ops/ops/*_ranks.py
    assert tried == rest, rest ^ tried


def check_fake_kernels_agree(rank, world, folder):
    """In shape, dtype and strides, for a transposed input of every dtype that travels."""
    for step, source, target, _ in steps():
        if not (source.holds(rank) or target.holds(rank)):
            continue
        local = source.local_shape(rank, SHAPE) if source.holds(rank) else (0, 0)
        for form in forms(step):
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                x = torch.ones(local[::-1], dtype=dtype).t()
                real = run_step(step, form, x, rank)
                with FakeTensorMode() as mode:
                    fake = run_step(step, form, mode.from_tensor(x), rank)
                told = [(y.shape, y.dtype, y.stride()) for y in (real, fake)]
                assert told[0] == told[1], (step, form, told)


def test_every_kind_of_step_is_tried():
    kinds = {type(step) for step, *_ in steps()}
    assert kinds == {AxisStep, TopStep, MoveStep}


@pytest.mark.distributed
@pytest.mark.timeout(250)
@pytest.mark.parametrize("check", [check_adjoints, check_fake_kernels_agree], ids=lambda check: check.__name__)
def test_on_four_ranks(check, gloo_checks):
    assert gloo_checks(__file__, 4)[check.__name__] == [None] * 4
