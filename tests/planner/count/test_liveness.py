from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind
from hetu_fx.planner.count.count import example_rows, owners, program_costs
from hetu_fx.planner.count.peaks import EVERYWHERE
from hetu_fx.planner.count.storages import Storages
from hetu_fx.planner.values.footprint import maximum_at
from tests import model_zoo
from tests.planner.programs import uncut


def real_peak(name: str, rows: int) -> int:
    """Run a model's graph forward and backward on real tensors; return the most bytes, without its leaves."""
    model, graph = model_zoo.captured(name)
    graph = graph.select(lambda leaf: leaf.kind is OutputKind.LOSS)
    values = dict(model.named_parameters()) | dict(model.named_buffers()) | dict(graph.constants)
    values |= model_zoo.to_double(model_zoo.SAMPLES[name].batch(rows, model_zoo.LENGTH))
    made = {LeafKind.COUNT: lambda node: torch.tensor(9, dtype=meta.dtype(node))}
    made[LeafKind.RANDOM_STATE] = lambda node: torch.zeros(3, dtype=torch.int64)
    leaves = [made[leaf.kind](leaf.node) if leaf.kind in made else values[leaf.name] for leaf in graph.leaves]
    return peak_of(lambda: graph.module()(*leaves)[0], leaves)


def peak_of(loss: Callable[[], Tensor], leaves: list[Tensor]) -> int:
    storages = Storages(0)
    storages.ignore(leaves)
    with storages:
        loss().backward()
    held = most = 0
    for change in storages.changes():
        held += change.bytes
        most = max(most, held)
    return most


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "conv"])
def test_what_is_found_without_data_is_what_a_real_step_holds(name: str) -> None:
    _, graph = model_zoo.captured(name)
    found = program_costs(**uncut(graph)).footprint(0, graph.num_blocks, 1.0)
    for rows in (example_rows(graph), 3):
        predicted = max(maximum_at(found.forward, rows), maximum_at(found.backward, rows))
        assert predicted == pytest.approx(real_peak(name, rows), rel=0.01)


@pytest.mark.parametrize("name", ["bert", "t5", "mixtral"])
def test_models_of_other_kinds_run_without_data_too(name: str) -> None:
    memory = program_costs(**uncut(model_zoo.captured(name)[1])).memory
    assert memory is not None
    assert all(part.kept.per_row > 0 for part in memory.parts)


def test_equal_blocks_hold_the_same() -> None:
    memory = program_costs(**uncut(model_zoo.captured("llama")[1])).memory
    assert memory is not None
    first, second = memory.parts[1:3]
    assert first == second
    assert first.kept.per_row > 0 == first.kept.fixed


def mask_graph() -> tuple[Graph, dict[str, fx.Node]]:
    _, graph = model_zoo.captured("llama")
    return graph, {node.name: node for node in graph.graph.nodes}


def test_what_several_parts_read_and_none_computes_belongs_to_every_stage() -> None:
    graph, nodes = mask_graph()
    ops = [node for node in nodes.values() if node.op == "call_function"]
    mixed = {node for node in ops if graph.block_of(node) is not None}
    part_of = owners(graph, mixed, lambda node: graph.position(node) + 1)
    assert {part_of[node] for node in mixed} == {1, 2}
    tables = {part_of[node] for node in ops if node not in mixed and node.name.startswith(("cos", "sin"))}
    assert tables == {EVERYWHERE}
