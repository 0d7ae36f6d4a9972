"""Every record of the table keeps what a communication op promises."""

import dataclasses

import pytest
import torch
from functorch.compile import aot_module, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode

from hetu_fx.comm_ops.ops.table import COMM_OPS
from hetu_fx.comm_ops.plans.cost import EqualLinks
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import CommError

CHANGE = "[0] -> [0] of 4x6"
# Args of one-rank calls on a (4, 6) tensor.
ALONE = {
    "identity": ([0],),
    "all_reduce": ([0], "partial"),
    "all_gather": ([0], 1, [3], 2, 1, "partial"),
    "reduce_scatter": ([0], 1, [3], 1, 2),
    "local_slice": ([0], 0, [4], 1, 1),
    "all_to_all": ([0], 0, [4], 1, 1, 1, [6], 1, 1),
    "repartition": ([0], 1, [3], 2, 1, [3]),
    "split_all_reduce": (CHANGE, "partial"),
    "split_all_gather": (CHANGE, "duplicate"),
    "split_reduce_scatter": (CHANGE,),
    "batched_send_receive": (CHANGE, CHANGE),
}
# Args of a call by rank 1 of three, on a (4, 6) tensor, and the shape that comes out.
TOP_SPLIT, TOP_WHOLE = "S(0, 2:1) over {[0,1] S(1, 2); [2]}", "over {[0,1] S(1, 2); [2]}"
SHAPES = {
    "identity": (([0, 1],), (4, 6)),
    "all_reduce": (([0, 1], "partial"), (4, 6)),
    "all_gather": (([0, 1], 1, [1, 2], 3, 1, "partial"), (4, 9)),
    "reduce_scatter": (([0, 1], 1, [2, 1], 1, 2), (4, 2)),
    "local_slice": (([2, 1], 0, [3, 1], 1, 1), (1, 6)),
    "all_to_all": (([2, 1], 0, [3, 1], 1, 1, 1, [5, 2], 1, 3), (1, 21)),
    "repartition": (([2, 1], 1, [1, 3], 2, 1, [3, 1]), (4, 2)),
    "split_all_reduce": ((f"P(2) {TOP_WHOLE} -> D(2) {TOP_WHOLE} of 4x12", "duplicate"), (4, 6)),
    "split_all_gather": ((f"{TOP_SPLIT} -> D(2) {TOP_WHOLE} of 6x12", "duplicate"), (6, 6)),
    "split_reduce_scatter": ((f"P(2) {TOP_WHOLE} -> {TOP_SPLIT} of 6x12",), (4, 6)),
    "batched_send_receive": (("[0-2] D(3) -> [0,1] S(1, 2) of ?x6", ""), (4, 3)),
}
# The ops of the backward; none where the gradient passes.
ADJOINTS = {
    "identity": ["all_reduce"],
    "all_reduce": ["all_reduce"],
    "all_gather": ["reduce_scatter"],
    "reduce_scatter": ["all_gather"],
    "local_slice": ["all_gather"],
    "all_to_all": ["all_to_all"],
    "repartition": ["repartition"],
    "split_all_reduce": ["split_all_reduce"],
    "split_all_gather": ["batched_send_receive"],
    "split_reduce_scatter": ["split_all_gather"],
    "batched_send_receive": ["batched_send_receive"],
}


class Flat(EqualLinks):
    """A topology where every link is alike."""

    def bytes_per_second(self, a, b):
        return 1e9

    def latency_seconds(self, a, b):
        return 1e-5

    def node_of(self, rank):
        return 0


@pytest.mark.parametrize("record", COMM_OPS.values(), ids=lambda record: record.name)
def test_records_are_complete(record):
    for field in dataclasses.fields(record):
        assert getattr(record, field.name) not in (None, "")
    assert record.summary.endswith(".")
    assert str(getattr(torch.ops.hetu, record.name).default._schema).endswith(record.schema)


@pytest.mark.parametrize("name", COMM_OPS)
def test_torch_accepts_the_registration(name):
    x = torch.randn(4, 6, requires_grad=True)
    results = torch.library.opcheck(getattr(torch.ops.hetu, name).default, (x, *ALONE[name]))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", COMM_OPS)
def test_a_call_of_one_rank_gives_its_input_and_gradient(name):
    x = torch.randn(4, 6, requires_grad=True)
    y = getattr(torch.ops.hetu, name)(x.t().contiguous().t(), *ALONE[name])
    gradient = torch.randn(4, 6)
    y.backward(gradient)
    assert torch.equal(y, x)
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("name", COMM_OPS)
def test_fake_shapes_are_those_of_the_rank(name):
    args, shape = SHAPES[name]
    with using(GroupTable.dry(1, 3)), FakeTensorMode():
        y = getattr(torch.ops.hetu, name)(torch.empty(4, 6, dtype=torch.float16), *args)
    assert tuple(y.shape) == shape
    assert y.dtype == torch.float16


@pytest.mark.parametrize("name", COMM_OPS)
def test_forms_change_neither_shape_nor_gradient_of_a_lone_rank(name):
    x = torch.randn(4, 6, requires_grad=True)
    y = getattr(torch.ops.hetu, name)(x, *ALONE[name], "nodes 0 from 0; padded below 1000")
    gradient = torch.randn(4, 6)
    y.backward(gradient)
    assert torch.equal(y, x)
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize("record", COMM_OPS.values(), ids=lambda record: record.name)
def test_cost_is_nothing_alone_and_grows_with_bytes(record):
    assert record.cost(1e6, (0,), Flat()) == 0
    costs = [record.cost(size, (0, 1, 2), Flat()) for size in (0, 1e3, 1e6, 1e9)]
    assert costs == sorted(costs)
    assert (costs[0] < costs[-1]) == (record.name not in ("identity", "local_slice"))


@pytest.mark.parametrize("record", COMM_OPS.values(), ids=lambda record: record.name)
def test_forms_are_flat_on_one_node_and_for_one_rank(record):
    assert str(record.algorithm(ALONE[record.name], Flat(), "two_level")) == ""
    args, _ = SHAPES[record.name]
    assert str(record.algorithm(args, Flat(), "two_level")) == ""


def test_ops_say_when_the_rank_or_the_size_is_wrong():
    with pytest.raises(CommError, match=r"rank 0 runs a communication of ranks \[1, 2\], which leave it out"):
        torch.ops.hetu.local_slice(torch.empty(4, 6), [1, 2], 0, [2, 2], 1, 1)
    with pytest.raises(CommError, match=r"all_gather expects dim 0 of size 3 .* shape \(4, 6\)"):
        torch.ops.hetu.all_gather(torch.empty(4, 6), [0], 0, [3], 1, 1, "partial")
    with pytest.raises(CommError, match=r"start the job with torchrun"):
        torch.ops.hetu.all_reduce(torch.empty(4, 6), [0, 1], "partial")


class Program(torch.nn.Module):
    """A forward that calls one op, and something of torch's own around it."""

    def __init__(self, name: str, *form: str):
        super().__init__()
        self.op, self.args = getattr(torch.ops.hetu, name), (*ALONE[name], *form)

    def forward(self, x):
        return self.op(x * 2, *self.args).sin().sum()


class Open(torch.nn.Module):
    """Calls of both kinds of arguments, with an open size."""

    def forward(self, x):
        x = torch.ops.hetu.identity(x, [0])
        x = torch.ops.hetu.batched_send_receive(x, "[0] -> [0] of ?x6", "[0] -> [0] of ?x6", "nodes 0 from 0")
        return torch.ops.hetu.all_gather(x, [0], 1, [6], 1, 1, "partial").sin().sum()


@pytest.mark.parametrize("name", COMM_OPS)
def test_every_op_goes_through_export_and_a_saved_file(name, tmp_path):
    x = torch.randn(4, 6)
    program = torch.export.export(Program(name, "nodes 0 from 4096"), (x,))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    assert "nodes 0 from 4096" in str(loaded.graph)
    torch.testing.assert_close(loaded.module()(x), (2 * x).sin().sum())


@pytest.mark.parametrize("name", COMM_OPS)
def test_every_op_compiles_with_its_gradient(name):
    torch._dynamo.reset()
    compiled = torch.compile(Program(name), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 6, requires_grad=True)
    compiled(x).backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x).cos())


@pytest.mark.parametrize("name", COMM_OPS)
def test_functorch_puts_the_adjoint_into_the_backward_graph(name):
    graphs = []

    def keep(module, _):
        graphs.append([str(node.target) for node in module.graph.nodes if "hetu" in str(node.target)])
        return make_boxed_func(module.forward)

    x = torch.randn(4, 6, requires_grad=True)
    aot_module(Program(name), fw_compiler=keep, bw_compiler=keep)(x).backward()
    forward, backward = graphs
    assert forward == [f"hetu.{name}.default"]
    assert backward == [f"hetu.{adjoint}.default" for adjoint in ADJOINTS[name]]
    torch.testing.assert_close(x.grad, 2 * (2 * x).cos())


def test_ops_keep_open_sizes_through_export_and_a_saved_file(tmp_path):
    program = torch.export.export(Open(), (torch.randn(4, 6),), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    x = torch.randn(7, 6)
    torch.testing.assert_close(loaded(x), x.sin().sum())


def test_ops_compile_with_dynamic_shapes_and_gradients():
    compiled = torch.compile(Open(), dynamic=True, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 6, requires_grad=True)
    compiled(x).backward()
    torch.testing.assert_close(x.grad, x.cos())
