"""A deduced graph that was written and read leads to the same device graphs, on the reader's own program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.errors import StateError
from hetu_fx.graph.capture import capture
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import Program, deduce_program, make_program
from hetu_fx.transforms.layouts.serialize import deserialize, serialize
from hetu_fx.transforms.specialize.specialize import Specialize
from tests.model_zoo import VOCABULARY, llama

PLANS = (
    Plan.data_parallel((0, 1), (2, 1)),
    Plan.tensor_parallel((0, 1), (2, 1)),
    Plan((Pipeline((Stage((0,)), Stage((1,))), micro_batches=2),)),
)


def program() -> Program:
    ids = torch.randint(1, VOCABULARY, (4, 6))
    return make_program(capture(llama(), {"input_ids": ids, "labels": ids}, training=True), frozenset())


@pytest.fixture(scope="module")
def two_processes() -> tuple[Program, Program]:
    """Capture one program twice, as two processes do."""
    return program(), program()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_graph_that_was_read_leads_to_the_same_device_graphs(
    two_processes: tuple[Program, Program], plan: Plan
) -> None:
    writer, reader = two_processes
    deduced = deduce_program(writer, plan, wants_values=False)
    found = deserialize(
        serialize(deduced, writer.graph, writer.factors, writer.flow), reader.graph, reader.factors, reader.flow
    )
    assert found.annotated.graph is reader.graph
    assert set(found.batch.states) <= set(reader.graph.graph.nodes)
    for rank in (0, 1):
        graphs = [Specialize(rank)(one) for one in (deduced, found)]
        assert len({str(device.graph) for device in graphs if device is not None}) == 1
    for mine, other in zip(found.parameters(), deduced.parameters(), strict=True):
        assert found.parameter_annotations(mine) == deduced.parameter_annotations(other)


def test_a_graph_of_another_program_is_refused(two_processes: tuple[Program, Program]) -> None:
    other = make_program(capture(nn.Linear(2, 2), {"input": torch.ones(4, 2)}, training=True), frozenset())
    writer = two_processes[0]
    deduced = deduce_program(writer, PLANS[0], wants_values=False)
    data = serialize(deduced, writer.graph, writer.factors, writer.flow)
    with pytest.raises(StateError, match="this process's graph lacks"):
        deserialize(data, other.graph, other.factors, other.flow)
