"""Whole models with one factor class cut: every value on the shards is the shard of the single-device value."""

from __future__ import annotations

import functools

import pytest
import torch

from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.deduction.factors.factors import FactorMap
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph
from tests.deduction.shards import cuts_of
from tests.deduction.simulate import Simulation
from tests.graph.compare import leaf_values
from tests.model_zoo import SAMPLES, captured, example


@functools.cache
def prepared(name: str) -> tuple[Graph, FactorMap, list[torch.Tensor]]:
    torch.manual_seed(0)
    model, graph = captured(name, dropout=False)
    batch = example(name)
    inputs = [leaf for leaf in graph.leaves if leaf.name in batch]
    assert all(meta.hints(leaf.node) == tuple(batch[leaf.name].shape) for leaf in inputs), (
        "the sizes that run are the hints"
    )
    return graph, analyse(graph), [value.detach() for value in leaf_values(graph, model, batch)]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_value_on_shards_of_every_class_is_the_shard_of_the_value(name: str) -> None:
    graph, factors, leaves = prepared(name)
    for cls in factors.classes:
        for cuts in cuts_of(cls.hint, 1) if factors.splittable(cls) else ():
            simulation = Simulation(graph, factors, cls, cuts)
            simulation.run(leaves)
