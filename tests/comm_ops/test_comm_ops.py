"""Every record of the table keeps what a communication op promises."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetu_fx.comm_ops import COMM_OPS
from hetu_fx.comm_ops.groups import GroupTable, using
from hetu_fx.errors import CommError

CHANGE = "[0] -> [0] of 4x6"
# Args of one-rank calls on a (4, 6) tensor.
ALONE = {
    "identity": ([0],),
    "all_reduce": ([0], "partial"),
    "all_gather": ([0], 1, [3], 2, 1, "partial"),
    "reduce_scatter": ([0], 1, [3], 1, 2),
    "local_slice": ([0], 0, [4], 1, 1),
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
    "split_all_reduce": ((f"P(2) {TOP_WHOLE} -> D(2) {TOP_WHOLE} of 4x12", "duplicate"), (4, 6)),
    "split_all_gather": ((f"{TOP_SPLIT} -> D(2) {TOP_WHOLE} of 6x12", "duplicate"), (6, 6)),
    "split_reduce_scatter": ((f"P(2) {TOP_WHOLE} -> {TOP_SPLIT} of 6x12",), (4, 6)),
    "batched_send_receive": (("[0-2] D(3) -> [0,1] S(1, 2) of ?x6", ""), (4, 3)),
}


class Flat:
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


@pytest.mark.parametrize("record", COMM_OPS.values(), ids=lambda record: record.name)
def test_cost_is_nothing_alone_and_grows_with_bytes(record):
    assert record.cost(1e6, (0,), Flat()) == 0
    assert 0 <= record.cost(1e3, (0, 1, 2), Flat()) <= record.cost(1e6, (0, 1, 2), Flat())


def test_ops_say_when_the_rank_or_the_size_is_wrong():
    with pytest.raises(CommError, match=r"rank 0 runs a communication of ranks \[1, 2\], which leave it out"):
        torch.ops.hetu.local_slice(torch.empty(4, 6), [1, 2], 0, [2, 2], 1, 1)
    with pytest.raises(CommError, match=r"all_gather expects dim 0 of size 3 .* shape \(4, 6\)"):
        torch.ops.hetu.all_gather(torch.empty(4, 6), [0], 0, [3], 1, 1, "partial")
    with pytest.raises(CommError, match=r"start the job with torchrun"):
        torch.ops.hetu.all_reduce(torch.empty(4, 6), [0, 1], "partial")


class Program(torch.nn.Module):
    """A forward that calls ops of both kinds of arguments."""

    def forward(self, x):
        x = torch.ops.hetu.identity(x, [0])
        x = torch.ops.hetu.batched_send_receive(x, "[0] -> [0] of ?x6", "[0] -> [0] of ?x6")
        return torch.ops.hetu.all_gather(x, [0], 1, [6], 1, 1, "partial").sin().sum()


def test_ops_go_through_export_and_a_saved_file(tmp_path):
    program = torch.export.export(Program(), (torch.randn(4, 6),), dynamic_shapes=({0: torch.export.Dim("n")},))
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    x = torch.randn(7, 6)
    torch.testing.assert_close(loaded(x), x.sin().sum())


def test_ops_compile_with_dynamic_shapes_and_gradients():
    compiled = torch.compile(Program(), dynamic=True, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 6, requires_grad=True)
    compiled(x).backward()
    torch.testing.assert_close(x.grad, x.cos())
