"""What is computed again in backward: which ops, that nothing else changes, and that less is kept."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hetu_fx.graph.blocks import block_index
from hetu_fx.graph.meta import module_stack
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.plans.recomputed import RecomputedOps
from hetu_fx.program.program import Program
from hetu_fx.transforms.lowering.graph_traffic import communications, sends
from hetu_fx.transforms.lowering.lower import Backend, lower
from hetu_fx.transforms.lowering.recompute import number_segments
from hetu_fx.transforms.lowering.recomputing_module import SAVED, RecomputingModule
from tests.oracles.traffic import traffic_by_block
from tests.transforms.cases import LENGTH, Case, batch_of
from tests.transforms.lowering.recorder import Recorder
from tests.transforms.plans import deduced, device_graph, feeder, program_of, talk, zoo_program

ONE = Plan.single()
TENSOR = Plan.tensor_parallel((0, 1), (2, 1))
CONTEXT = replace(Plan.context_parallel((0, 1), (3, 1)), attention="gathered")
SEQUENCE = replace(TENSOR, sequence_parallel=True)
RING = replace(CONTEXT, attention="ring")


def again(plan: Plan, blocks: int, ops: RecomputedOps = "all") -> Plan:
    """Let the first stage recompute so many blocks, of these those ops."""
    first, *rest = plan.pipelines
    stage, *stages = first.stages
    return replace(plan, pipelines=(replace(first, stages=(stage.recomputing(blocks, ops), *stages)), *rest))


@pytest.mark.parametrize(
    "plan", [ONE, TENSOR, CONTEXT, SEQUENCE, RING], ids=["one", "tensor", "context", "sequence", "ring"]
)
@pytest.mark.parametrize("blocks", [1, 2])
def test_all_ops_of_the_first_blocks_are_in_runs_but_those_that_send(llama: Case, plan: Plan, blocks: int) -> None:
    paths = llama.program.graph.block_paths
    for rank in plan.devices:
        device = device_graph(llama.program, again(plan, blocks), rank)
        inside = {node for run in device.recomputed for node in run}
        own = {n for n in device.graph.nodes if block_index(module_stack(n), paths) in range(blocks)}
        assert own
        assert {node for node in own - inside if not sends(node)} == set()
        assert not any(sends(node) for node in inside)
        assert {block_index(module_stack(node), paths) for node in inside} <= {*range(blocks), None}
        device.graph.lint()


def test_a_run_is_one_piece_of_the_graph_and_reads_no_later_one(llama: Case) -> None:
    device = device_graph(llama.program, again(CONTEXT, 2), 0)
    order = {node: i for i, node in enumerate(device.graph.nodes)}
    for run in device.recomputed:
        places = [order[node] for node in run]
        assert places == list(range(places[0], places[0] + len(run)))


def test_a_block_is_cut_only_where_something_waits_for_a_message(llama: Case) -> None:
    assert len(device_graph(llama.program, again(ONE, 1), 0).recomputed) == 1
    halves = device_graph(llama.program, again(TENSOR, 1), 0).recomputed
    assert len(halves) == 3
    assert [str(node.target) for node in halves[-1]] == ["aten.add.Tensor"]
    device = device_graph(llama.program, again(CONTEXT, 1), 0)
    before, after = device.recomputed
    between = [node for node in communications(device) if before[-1] < node < after[0]]
    assert [node.target._opname for node in between] == ["all_gather", "all_gather"]


def test_what_is_made_of_weights_alone_is_made_where_it_is_read() -> None:
    device = device_graph(zoo_program("mixtral"), again(TENSOR, 1), 0)
    attention, experts, _ = ({n.name for node in run for n in node.all_input_nodes} for run in device.recomputed)
    assert {name for name in experts if "experts" in name}
    assert not {name for name in attention if "experts" in name}


@pytest.mark.parametrize("plan", [TENSOR, CONTEXT, SEQUENCE, RING], ids=["tensor", "context", "sequence", "ring"])
def test_communication_is_the_same_and_in_the_same_order(llama: Case, plan: Plan) -> None:
    paths = llama.program.graph.block_paths
    for rank in plan.devices:
        plain, device = (device_graph(llama.program, p, rank) for p in (plan, again(plan, 2)))
        assert talk(device) == talk(plain)
        assert traffic_by_block(device, paths) == traffic_by_block(plain, paths)


@pytest.mark.parametrize("plan", [TENSOR, CONTEXT, SEQUENCE], ids=["tensor", "context", "sequence"])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_reordered_graph_computes_the_model(name: str, plan: Plan, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(name).same_as_alone(again(plan, 2), LENGTH)


def test_each_stage_recomputes_its_own_first_blocks(t5: Case) -> None:
    stages = (Stage((0,), blocks=1), Stage((1,), blocks=3, recompute=2))
    made = deduced(t5.program, Plan((Pipeline(stages), Pipeline((Stage((2,), recompute=4),)))))
    first, second = made.annotated.pipelines
    assert [list(one.recomputed(part)) for one, part in ((first, 0), (first, 1), (second, 0))] == [
        [],
        [1, 2],
        [0, 1, 2, 3],
    ]
    paths = t5.program.graph.block_paths
    device = device_graph(t5.program, made.annotated.plan, 1)
    assert {block_index(module_stack(n), paths) for run in device.recomputed for n in run} == {1, 2}


class Drawing(nn.Module):
    """Draws from torch's generator; no law by a formula is known of a Poisson sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * torch.poisson(x.softmax(1))


def test_what_draws_from_the_generator_is_kept() -> None:
    model = nn.Sequential(Drawing(), Drawing(), nn.Linear(6, 1))
    program = program_of(model, (torch.randn(4, 6),), lambda output, x: output.mean())
    device = device_graph(program, again(ONE, 2), 0)
    ops = [str(node.target) for run in device.recomputed for node in run]
    assert "aten.poisson.default" in [str(node.target) for node in device.graph.nodes]
    assert "aten.linear.default" in ops
    assert "aten.poisson.default" not in ops


class Kept(TorchDispatchMode):
    """Tells how many bytes of what has been made inside are still there at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}
        self.at_the_end = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def __exit__(self, *problem: Any) -> None:
        self.at_the_end = sum(size for storage, size in self.made.items() if not storage.expired())
        super().__exit__(*problem)


def trained(
    program: Program,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    plan: Plan,
    backend: Backend = None,
    kept: Any = None,
) -> list[Tensor]:
    """Run forward, watched by `kept`, and backward on one device; return loss and all gradients."""
    given = feeder(program, plan, model, batch)
    device = device_graph(program, plan, 0)
    values = [given(0, slot) for slot in device.slots]
    leaves = [v.detach().clone().requires_grad_(v.requires_grad) for v in values]
    function = lower(RecomputingModule()(device), backend)
    with kept or nullcontext():
        (loss,) = function(*leaves)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit"])
def test_gradients_are_bit_by_bit_those_without(name: str, request: pytest.FixtureRequest) -> None:
    case = request.getfixturevalue(name)
    kept = [Kept() for _ in range(3)]
    what = case.program, case.model, batch_of(name, LENGTH)
    expected, *others = (trained(*what, again(ONE, blocks), kept=kept[blocks]) for blocks in range(3))
    assert kept[0].at_the_end > kept[1].at_the_end > kept[2].at_the_end
    assert len(expected) > 10
    for found in others:
        assert all(map(torch.equal, found, expected))


OPS: tuple[RecomputedOps, ...] = ("pointwise", "attention", "all")
"""From what keeps most to what keeps least."""


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "vit"])
def test_the_fewer_ops_are_recomputed_the_more_is_kept_and_gradients_stay(
    name: str, request: pytest.FixtureRequest
) -> None:
    case = request.getfixturevalue(name)
    what = case.program, case.model, batch_of(name, LENGTH)
    kept = {ops: Kept() for ops in OPS}
    plain = Kept()
    expected = trained(*what, ONE, kept=plain)
    for ops in OPS:
        found = trained(*what, again(ONE, 2, ops), kept=kept[ops])
        assert all(map(torch.equal, found, expected))
    sizes = [plain.at_the_end, *(kept[ops].at_the_end for ops in OPS)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) >= 3


class Counted(TorchDispatchMode):
    """Counts the products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[str, int] = {"weights": 0, "activations": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products["weights"] += func in SAVED["attention"]
        self.products["activations"] += func in SAVED["pointwise"] - SAVED["attention"]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_kept_is_not_computed_again(name: str, request: pytest.FixtureRequest) -> None:
    case = request.getfixturevalue(name)
    found: dict[str, dict[str, int]] = {}
    for ops in ("none", *OPS):
        counted = Counted()
        plan = ONE if ops == "none" else again(ONE, 2, ops)
        with counted:
            trained(case.program, case.model, batch_of(name, LENGTH), plan)
        found[ops] = counted.products
    assert found["pointwise"] == found["none"]
    assert found["attention"]["weights"] == found["none"]["weights"] < found["all"]["weights"]
    assert found["attention"]["activations"] > found["none"]["activations"]


class Partition(Recorder):
    """A compiler that tells how many bytes its forward graph hands to the backward."""

    @property
    def saved_bytes(self) -> int:
        forward, _ = self.graphs
        made = [n for n in forward.graph.output_node().args[0] if n.op == "call_function"]  # type: ignore[union-attr]
        values = [node.meta["val"] for node in made]
        return sum(hinted(v) * v.element_size() for v in values if isinstance(v, Tensor))


def hinted(value: Tensor) -> int:
    total = 1
    for size in value.shape:
        total *= size if isinstance(size, int) else size.node.hint
    return total


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


def test_a_compiled_graph_keeps_less_too_and_gives_the_same() -> None:
    model = nn.Sequential(Mix(), Mix(), nn.Linear(6, 1)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    what = program_of(model, (x,), lambda output, x: output.mean()), model, {"0": x}
    expected = trained(*what, ONE)
    backends = [Partition() for _ in range(3)]
    for blocks, backend in enumerate(backends):
        found = trained(*what, again(ONE, blocks), backend)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    none, one, both = (backend.saved_bytes for backend in backends)
    assert none > one > both
    light = Partition()
    for given, other in zip(trained(*what, again(ONE, 2, "pointwise"), light), expected, strict=True):
        torch.testing.assert_close(given, other, rtol=1e-12, atol=1e-12)
    assert none > light.saved_bytes > both


def test_ops_wait_for_the_messages_of_their_part_and_casts_of_weights_for_their_readers() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    cast = graph.call_function(operator.neg, (weight,))
    made = graph.call_function(operator.neg, (x,))
    summed = graph.call_function(operator.neg, (made,))
    beside = graph.call_function(operator.neg, (made,))
    read = graph.call_function(operator.add, (summed, cast))
    later = graph.call_function(operator.add, (read, beside))
    ops = [cast, made, summed, beside, read]
    segments = number_segments(ops, frozenset({summed}), frozenset({weight}))
    assert [segments[op] for op in ops] == [1, 0, 0, 0, 1]
    assert number_segments([later], frozenset({summed}), frozenset({weight})) == {later: 0}
