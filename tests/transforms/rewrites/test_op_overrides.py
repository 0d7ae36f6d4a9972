"""Ops that are overridden compute in a wider dtype or on the host; the rest stays; files are read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from hetu_fx.errors import AlignError
from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.passes import REWRITES, rewrites_for
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides, Override, find_op

SOFTMAX, TOPK = "aten.softmax.int", "aten.topk.default"


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = torch.softmax(self.head(x), -1).topk(2)
        return values.float().sum(), places


def overridden(overrides: dict[str, str], dtype: torch.dtype = torch.bfloat16) -> Graph:
    graph = capture(Scored().to(dtype), (torch.randn(4, 6, dtype=dtype),))
    made = Override(OpOverrides(overrides))(graph)
    made.graph.lint()
    return made


def node_of(graph: Graph, op: str) -> fx.Node:
    return next(node for node in graph.graph.nodes if str(node.target) == op)


def test_an_op_that_is_up_cast_reads_and_makes_wider_numbers_and_its_users_get_the_old_dtype() -> None:
    graph = overridden({SOFTMAX: "up-cast"})
    softmax = node_of(graph, SOFTMAX)
    assert meta.dtype(softmax) is meta.dtype(softmax.all_input_nodes[0]) is torch.float32
    assert [(str(user.target), meta.dtype(user)) for user in softmax.users] == [("aten.to.dtype", torch.bfloat16)]
    assert meta.dtype(node_of(graph, "aten.linear.default")) is torch.bfloat16


def test_the_values_are_those_of_casts_by_hand() -> None:
    x = torch.randn(4, 5, dtype=torch.bfloat16)
    graph = overridden({"aten.linear.default": "up-cast"})
    weight, bias = torch.randn(5, 6, dtype=torch.bfloat16), torch.randn(5, dtype=torch.bfloat16)
    rows = torch.randn(7, 6, dtype=torch.bfloat16)
    made, places = graph.module()(weight, bias, rows)
    by_hand = nn.functional.linear(rows.float(), weight.float(), bias.float()).to(x.dtype).softmax(-1).topk(2)
    assert torch.equal(made, by_hand[0].float().sum())
    assert torch.equal(places, by_hand[1])


def test_each_part_of_a_tuple_is_brought_back_and_whole_numbers_stay() -> None:
    graph = overridden({TOPK: "up-cast"})
    parts = {meta.dtype(user): user for user in node_of(graph, TOPK).users}
    assert parts.keys() == {torch.float32, torch.int64}
    assert [meta.dtype(user) for user in parts[torch.float32].users] == [torch.bfloat16]
    assert [meta.dtype(value) for value in graph.output_values] == [torch.float32, torch.int64]


def test_float32_is_widened_to_float64_and_float64_stays() -> None:
    assert meta.dtype(node_of(overridden({SOFTMAX: "up-cast"}, torch.float32), SOFTMAX)) is torch.float64
    wide = overridden({SOFTMAX: "up-cast"}, torch.float64)
    assert not [
        node for node in wide.graph.nodes if "to.dtype" in str(node.target) and meta.dtype(node) is torch.float64
    ]


def test_an_op_on_the_host_is_marked_and_stays_until_the_graph_is_put_on_a_device() -> None:
    graph = overridden({SOFTMAX: "on host"}, torch.float32)
    marked = [str(node.target) for node in graph.graph.nodes if meta.runs_on_host(node)]
    assert marked == [SOFTMAX]


def test_on_a_device_that_is_the_host_nothing_moves() -> None:
    plain, moved = overridden({}), overridden({SOFTMAX: "on host"})
    assert [str(node.target) for node in moved.graph.nodes] == [str(node.target) for node in plain.graph.nodes]


def test_an_op_that_is_not_there_is_noted() -> None:
    assert (
        "aten.gelu.default is to run 'up-cast', and is no op of this graph"
        in overridden({"aten.gelu.default": "up-cast"}).notes
    )


def test_without_overrides_the_graph_is_the_same_object_and_the_pass_stands_in_the_list() -> None:
    graph = overridden({})
    assert Override()(graph) is graph
    overrides = OpOverrides({SOFTMAX: "up-cast"})
    assert [type(one) for one in rewrites_for(overrides)] == [type(one) for one in REWRITES]
    assert Override(overrides) in rewrites_for(overrides)


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    overrides = OpOverrides({SOFTMAX: "up-cast", TOPK: "on host"})
    overrides.write(tmp_path / "align.json")
    assert OpOverrides.read(tmp_path / "align.json") == overrides


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"aten.sofmax.int": "up-cast"}', r"align.json: ops: 'aten.sofmax.int' is no op .*mean 'aten.softmax.int'\?"),
        ('{"aten.softmax.int": "upcast"}', r"must be one of 'up-cast', 'on host', not .*did you mean 'up-cast'\?"),
        ('{"aten.softmax.int": 3}', "must be one of 'up-cast', 'on host', not a number: 3"),
        ('["aten.softmax.int"]', "'ops' must be an object of ops"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_the_place(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "align.json").write_text(f'{{"format": "hetu_fx.align/1", "ops": {text}}}')
    with pytest.raises(AlignError, match=says):
        OpOverrides.read(tmp_path / "align.json")


def test_ops_are_found_by_their_whole_names() -> None:
    assert find_op(SOFTMAX, "here") is torch.ops.aten.softmax.int
    for name in ("aten.softmax", "softmax", "aten.softmax.int.more"):
        with pytest.raises(AlignError, match=r"write it like aten\.linear\.default"):
            find_op(name, "here")
