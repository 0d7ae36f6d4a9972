"""hetu::ring_attention keeps what a communication op promises: through export, compilation, and its own backward."""

import dataclasses

import pytest
import torch
from functorch.compile import aot_module, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.comm_ops.ops.table import COMM_OPS, FUSED_OPS, OPS
from hetu_fx.comm_ops.plans.cost import EQUAL_LINKS
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import CommError

attention = torch.nn.functional.scaled_dot_product_attention
ring_attention = torch.ops.hetu.ring_attention
RING = "ring_attention", "ring_attention_backward"


def tensors(length: int = 5, trained: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 8))
    return [torch.randn(shape).requires_grad_(trained) for shape in shapes]


class Program(torch.nn.Module):
    """A forward that attends, and something of torch's own around it."""

    def __init__(self, is_causal: bool = True):
        super().__init__()
        self.is_causal = is_causal

    def forward(self, query, key, value, mask=None):
        sizes = [query.shape[2]]
        out, _ = ring_attention(query * 2, key, value, mask, None, None, [0], sizes, sizes, self.is_causal, None)
        return out.sin().sum()


def expected(query, key, value, mask=None, is_causal=True):
    return attention(query * 2, key, value, mask, is_causal=is_causal, enable_gqa=True).sin().sum()


def test_the_one_table_lists_it_with_all_that_a_record_says():
    assert {**COMM_OPS, **FUSED_OPS} == OPS
    for record in map(FUSED_OPS.__getitem__, RING):
        told = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        assert told.pop("backward_op") in (*FUSED_OPS, None)
        assert all(value not in (None, "") for value in told.values())
        assert str(record.overload._schema).endswith(record.schema)
        assert record.cost(1e6, (0,), EQUAL_LINKS) == 0
        costs = [record.cost(size, (0, 1, 2), EQUAL_LINKS) for size in (0, 1e3, 1e6)]
        assert costs == sorted(set(costs))


def test_a_turn_there_and_back_costs_the_keys_and_values_again_and_one_more_hop():
    forward, backward = (FUSED_OPS[name].cost(300.0, (0, 1, 2), EQUAL_LINKS) for name in RING)
    assert (forward, backward) == (200, 500)


def test_it_knows_one_form():
    cluster = Cluster.on_paper([1e9] * 4, nodes=("a", "a", "b", "b"), inter=Link(1e7))
    args = ([0, 1, 2, 3], [1] * 4, [1] * 4, False, None)
    assert str(Lowering(cluster, "two_level").algorithm("ring_attention", *args)) == ""


@pytest.mark.parametrize("mask", [None, torch.rand(2, 1, 5, 5) < 0.7])
def test_torch_accepts_the_registration(mask):
    args = (*tensors(), mask, None, None, [0], [5], [5], mask is None, None)
    assert set(torch.library.opcheck(ring_attention.default, args).values()) == {"SUCCESS"}
    out, lse = ring_attention(*args)
    back = (torch.randn_like(out), *tensors(trained=False), mask, None, None, out.detach(), lse.detach(), *args[6:])
    assert set(torch.library.opcheck(torch.ops.hetu.ring_attention_backward.default, back).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_fake_shapes_are_those_of_the_rank(dtype):
    with using(GroupTable.dry(1, 3)), FakeTensorMode():
        query, key = torch.empty(2, 4, 3, 8, dtype=dtype), torch.empty(2, 2, 6, 8, dtype=dtype)
        value = torch.empty(2, 2, 6, 10, dtype=dtype)
        out, lse = ring_attention(query, key, value, None, None, None, [0, 1], [5, 3], [2, 6], False, None)
        back = torch.ops.hetu.ring_attention_backward(
            out, query, key, value, None, None, None, out, lse, [0, 1], [5, 3], [2, 6], False, None
        )
    assert (tuple(out.shape), out.dtype, tuple(lse.shape)) == ((2, 4, 3, 10), dtype, (2, 4, 3))
    assert lse.dtype == (torch.float32 if dtype is torch.float16 else dtype)
    assert [x.shape for x in back] == [x.shape for x in (query, key, value)]


def test_it_says_when_parts_have_other_sizes_and_refuses_a_second_derivative():
    with pytest.raises(CommError, match=r"expects \[4, 5, 5\] queries, keys and values at position 0 of queries \[4\]"):
        ring_attention(*tensors(), None, None, None, [0], [4], [5], False, None)
    given = tensors()
    out, _ = ring_attention(*given, None, None, None, [0], [5], [5], False, None)
    (gradient,) = torch.autograd.grad(out.sum(), given[:1], create_graph=True)
    with pytest.raises(CommError, match="no second derivative through ring_attention"):
        gradient.sum().backward()


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_goes_through_export_and_a_saved_file_with_open_sizes(is_causal, tmp_path):
    length = torch.export.Dim("length")
    open_sizes = {name: {2: length} for name in ("query", "key", "value")}
    program = torch.export.export(Program(is_causal), tuple(tensors(trained=False)), dynamic_shapes=open_sizes)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    given = tensors(9, trained=False)
    torch.testing.assert_close(loaded(*given), expected(*given, is_causal=is_causal))


def test_it_compiles_with_dynamic_shapes_and_gradients():
    torch._dynamo.reset()
    compiled = torch.compile(Program(), backend="aot_eager", dynamic=True, fullgraph=True)
    for length in (5, 8):
        given = tensors(length)
        loss = compiled(*given)
        found = torch.autograd.grad(loss, given)
        for one, other in zip(found, torch.autograd.grad(expected(*given), given), strict=True):
            torch.testing.assert_close(one, other)


def test_functorch_puts_its_backward_into_the_backward_graph():
    graphs = []

    def keep(module, _):
        graphs.append([str(node.target) for node in module.graph.nodes if "hetu" in str(node.target)])
        return make_boxed_func(module.forward)

    given = tensors()
    aot_module(Program(), fw_compiler=keep, bw_compiler=keep)(*given).backward()
    assert graphs == [["hetu.ring_attention.default"], ["hetu.ring_attention_backward.default"]]
    for x, other in zip(given, torch.autograd.grad(expected(*given), given), strict=True):
        torch.testing.assert_close(x.grad, other)
