"""Tensor parallel groups of more devices than there are key-value heads: who holds what, and that all is as on one."""

from __future__ import annotations

import pytest
from torch import nn

from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.program.program import Program
from tests.model_zoo import SAMPLES
from tests.transforms.cases import LENGTH, batch_of
from tests.transforms.plans import deduced, device_graph, program_of, same_in_group, talk

pytestmark = pytest.mark.usefixtures("losses_in_double")


def grouped(heads: int, shared: int, dropout: float = 0.0) -> tuple[Program, nn.Module]:
    """Return a decoder of so many heads, which share so many key-value heads."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": shared, "hidden_size": 48, "intermediate_size": 48}
    model = SAMPLES["llama"].model(**sizes, attention_dropout=dropout).double().train()
    return program_of(model, batch_of("llama", LENGTH)), model


def group(*ratios: int, context: int = 1) -> Plan:
    return Plan((Pipeline((Stage(tuple(range(len(ratios) * context)), ratios, context=context),)),))


@pytest.mark.parametrize(("heads", "shared", "devices"), [(4, 2, 4), (8, 2, 4), (6, 3, 6), (4, 1, 4)])
def test_groups_of_more_devices_than_key_value_heads_compute_as_one_device(
    heads: int, shared: int, devices: int
) -> None:
    program, model = grouped(heads, shared)
    same_in_group(program, model, group(*(1,) * devices), batch_of("llama", 7), limit=1e-10)


def test_unequal_shares_of_a_key_value_head_and_of_the_sequence_compute_as_one_device() -> None:
    program, model = grouped(8, 2)
    same_in_group(program, model, group(3, 1, 3, 1), batch_of("llama", 7), limit=1e-10)
    same_in_group(program, model, group(1, 1, 1, 1, context=2), batch_of("llama", 7), limit=1e-10)


@pytest.mark.parametrize("ratios", [(1, 1, 1, 1), (3, 1, 3, 1)])
def test_dropout_of_attention_draws_for_the_heads_that_a_device_has(ratios: tuple[int, ...]) -> None:
    program, model = grouped(8, 2, dropout=0.3)
    same_in_group(program, model, group(*ratios), batch_of("llama", 7), limit=1e-10)


def test_devices_that_share_a_key_value_head_hold_it_whole_and_sum_its_gradient_late() -> None:
    program, _ = grouped(8, 2)
    made = deduced(program, group(1, 1, 1, 1))
    found = {leaf.name: tuple(map(str, made.parameter_annotations(leaf))) for leaf in made.parameters()}
    attention = "model.layers.0.self_attn"
    assert found[f"{attention}.q_proj.weight"] == ("[0-3] S(0, 4, 1x_x6)",) * 2
    assert found[f"{attention}.k_proj.weight"] == ("[0-3] S(0, 2, 1x_x6) D(2)", "[0-3] S(0, 2, 1x_x6) P(2)")
    assert found["model.layers.0.mlp.up_proj.weight"] == ("[0-3] S(0, 4)",) * 2
    layer = [line for line in talk(device_graph(program, group(1, 1, 1, 1), 3)) if "layers.0" in line]
    assert {line.split(" [")[0] for line in layer} == {"identity", "all_reduce"}


@pytest.mark.parametrize("ratios", [(1, 1, 1), (2, 1, 1, 1)])
def test_what_does_not_share_key_value_heads_alike_is_refused(ratios: tuple[int, ...]) -> None:
    program, _ = grouped(8, 2)
    with pytest.raises(PlanError, match="give a multiple of 2 devices, the same ratios to those that share each"):
        deduced(program, group(*ratios))


def test_more_devices_than_heads_of_queries_are_refused() -> None:
    program, _ = grouped(4, 2)
    with pytest.raises(PlanError, match="cannot split a dimension of 2 parts over 8 devices"):
        deduced(program, group(*(1,) * 8))
