"""Of a model's blocks a trial keeps one of each kind wherever the plan treats them alike."""

from __future__ import annotations

import torch

from hetu_fx.check.model import Narrowing
from hetu_fx.check.trial_blocks import KeptBlocks, kinds_of_blocks, recast_program, same_ops
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.check.nets import GROUP, SHARES, Block, Tokens, graph_of, tokens_batch


class Mixed(Tokens):
    """Every other block drops."""

    def __init__(self) -> None:
        super().__init__(blocks=6)
        for number in (1, 3, 5):
            self.blocks[number] = Block(8, drop=0.1)


def test_blocks_of_one_kind_are_told_from_others_whatever_they_draw() -> None:
    kinds = kinds_of_blocks(graph_of(Mixed(), tokens_batch()).program.graph)
    assert len(set(kinds)) == 2
    assert kinds[0] == kinds[2] == kinds[4]
    assert kinds[1] == kinds[3] == kinds[5]


def test_each_kind_stays_in_every_run_that_stages_treat_alike() -> None:
    graph = graph_of(Mixed(), tokens_batch()).program.graph
    assert KeptBlocks.of(SHARES, graph).kept == (0, 1)
    stages = Pipeline((Stage((0,), blocks=4), Stage((1,), blocks=2)))
    assert KeptBlocks.of(Plan((stages,)), graph).kept == (0, 1, 4, 5)


def test_stages_and_what_they_recompute_keep_what_they_had() -> None:
    graph = graph_of(Tokens(blocks=6), tokens_batch()).program.graph
    first = Pipeline((Stage((0,), blocks=4, recompute=3), Stage((1,), blocks=2)))
    plan = Plan((first, Pipeline((Stage((2,), blocks=6),))))
    kept = KeptBlocks.of(plan, graph)
    assert kept.kept == (0, 3, 4)
    assert kept.plan(plan).summary() == "1 row: [0]x2 recompute 1 > [1]x1 | 1 row: [2]x3"
    kept.plan(plan).check(num_blocks=3, world_size=3)


def test_names_of_a_shortened_list_lead_back_to_the_model() -> None:
    graph = graph_of(Tokens(blocks=6), tokens_batch()).program.graph
    kept = KeptBlocks(graph.block_paths, (1, 4))
    assert kept.original_names() == {"blocks.0": "blocks.1", "blocks.1": "blocks.4"}
    assert kept.dropped_blocks == {"blocks.0", "blocks.2", "blocks.3", "blocks.5"}


def test_a_graph_with_fewer_blocks_has_the_same_ops_and_another_model_has_not() -> None:
    whole = graph_of(Tokens(blocks=5), tokens_batch()).program.graph
    blocks = KeptBlocks.of(GROUP, whole)
    assert same_ops(whole, graph_of(Tokens(blocks=2).double(), tokens_batch(4, 8)).program.graph, blocks)
    assert not same_ops(whole, graph_of(Tokens(blocks=3), tokens_batch()).program.graph, blocks)


def test_a_program_is_recast_to_what_the_small_model_is_captured_as() -> None:
    program = graph_of(Tokens(blocks=5), tokens_batch()).program
    blocks = KeptBlocks.of(GROUP, program.graph)
    made = recast_program(program, blocks, Narrowing({1500: 156}), torch.float64)
    captured = graph_of(Tokens(blocks=2, tokens=156).double(), {k: x % 156 for k, x in tokens_batch().items()}).program
    assert _told(made.graph) == _told(captured.graph)
    assert made.graph.block_paths == captured.graph.block_paths == ("blocks.0", "blocks.1")


def _told(graph: Graph) -> list[tuple[str, str, str]]:
    """Return the names and forms of leaves, and those of ops."""
    names = {leaf.node: leaf.name for leaf in graph.leaves}
    nodes = [node for node in graph.graph.nodes if meta.is_tensor(node)]
    return [(names.get(node, str(node.target)), str(meta.shape(node)), str(meta.dtype(node))) for node in nodes]
