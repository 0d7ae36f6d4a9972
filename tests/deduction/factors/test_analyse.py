"""The classes of whole models: the parallel dimensions that one would name by hand, and no others."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.errors import DeductionError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph
from tests.model_zoo import SAMPLES, captured

FIXED = torch.zeros(48)  # what it is added to has a fixed size


@functools.cache
def analysed(name: str) -> tuple[Graph, FactorMap]:
    _, graph = captured(name)
    return graph, analyse(graph)


def of(module: Callable[..., torch.Tensor] | nn.Module, *inputs: torch.Tensor) -> tuple[Graph, FactorMap]:
    class Function(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return module(*inputs)

    graph = capture(module if isinstance(module, nn.Module) else Function(), inputs, training=False)
    return graph, analyse(graph)


def groups(factors: FactorMap, size: int) -> list[list[str]]:
    """Return, for each class of a size in parameters, the parameter dims ("weight.dim") it occurs in."""
    found = [factors.occurrences(cls) for cls in factors.classes if cls.size == size]
    return [[f"{name}.{dim}" for name, dim in dims] for dims in found if dims]


def short(dims: list[str], prefix: str) -> list[str]:
    assert all(dim.startswith(prefix) for dim in dims)
    return [dim.removeprefix(prefix).replace(".weight", "").replace("_proj", "") for dim in dims]


def parameter_class(factors: FactorMap, name: str, dim: int, size: int) -> FactorClass:
    return next(cls for cls in factors.classes if cls.size == size and (name, dim) in factors.occurrences(cls))


def test_grouped_heads_are_shared_by_all_four_projections_and_repeats_by_two() -> None:
    _, factors = analysed("llama")
    heads = [g for g in groups(factors, 3)]
    repeats = groups(factors, 2)
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.self_attn."
        assert short(heads[layer], prefix) == ["q.0", "k.0", "v.0", "o.1"]
        assert short(repeats[layer], prefix) == ["q.0", "o.1"]
    assert len(heads) == len(repeats) == 2


def test_query_and_key_channels_are_one_class_through_the_rotary_tables_and_value_channels_one_per_layer() -> None:
    _, factors = analysed("llama")
    shared, *values = groups(factors, 8)
    assert [dim.split(".")[2] + dim.split(".")[4][0] for dim in shared] == ["0q", "0k", "1q", "1k"]
    assert [short(dims, f"model.layers.{i}.self_attn.") for i, dims in enumerate(values)] == [["v.0", "o.1"]] * 2


def test_feed_forward_is_one_class_per_layer_and_hidden_one_for_all() -> None:
    _, factors = analysed("llama")
    assert [short(dims, f"model.layers.{i}.mlp.") for i, dims in enumerate(groups(factors, 112))] == [
        ["gate.0", "up.0", "down.1"]
    ] * 2
    assert [len(dims) for dims in groups(factors, 48)] == [21]


def test_untied_vocabularies_are_two_classes_and_tied_ones_one() -> None:
    assert groups(analysed("llama")[1], 97) == [["model.embed_tokens.weight.0"], ["lm_head.weight.0"]]
    assert groups(analysed("gpt2")[1], 97) == [["transformer.wte.weight.0"]]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_rows_of_all_inputs_are_one_batch_class(name: str) -> None:
    graph, factors = analysed(name)
    (batch,) = [cls for cls in factors.classes if cls.is_batch]
    inputs = {leaf.name for leaf, dim in factors.leaf_dims(batch) if dim == 0}
    assert inputs == {leaf.name for leaf in graph.leaves if leaf.kind == "input"}
    assert factors.splittable(batch)


def test_shifted_labels_are_a_class_of_their_own() -> None:
    graph, factors = analysed("llama")
    ids, labels = (leaf.node for leaf in graph.leaves if leaf.kind == "input")
    assert factors.dims(ids)[0] == factors.dims(labels)[0]
    assert factors.dims(ids)[1] != factors.dims(labels)[1]


def test_a_fused_projection_is_pieces_heads_and_channels() -> None:
    graph, factors = analysed("gpt2")
    leaf = next(leaf for leaf in graph.leaves if leaf.name == "transformer.h.0.attn.c_attn.weight")
    assert [cls.size for cls in factors.dims(leaf.node)[1]] == [3, 6, 8]
    heads = parameter_class(factors, leaf.name, 1, 6)
    assert factors.sub_factor(leaf.node, 1, heads) == (3, 8)
    assert ("transformer.h.0.attn.c_proj.weight", 0) in factors.occurrences(heads)
    assert ("transformer.h.0.attn.c_attn.bias", 0) in factors.occurrences(heads)


def test_biases_go_with_the_rows_of_their_weights() -> None:
    _, factors = analysed("bert")
    prefix = "bert.encoder.layer.0."
    assert short(groups(factors, 112)[0], prefix) == [
        "intermediate.dense.0",
        "intermediate.dense.bias.0",
        "output.dense.1",
    ]
    heads = groups(factors, 6)
    assert len(heads) == 2
    assert len(heads[0]) == 7


def test_a_hidden_class_that_a_square_weight_has_twice_cannot_be_split() -> None:
    _, factors = analysed("bert")
    hidden = parameter_class(factors, "cls.predictions.transform.dense.weight", 0, 48)
    assert hidden in factors.repeated
    assert not factors.splittable(hidden)


def test_a_vision_transformer_has_patches_heads_and_feed_forward() -> None:
    _, factors = analysed("vit")
    assert len(groups(factors, 6)) == len(groups(factors, 112)) == 2
    assert groups(factors, 13) == [["classifier.weight.0", "classifier.bias.0"]]
    assert ["vit.embeddings.patch_embeddings.projection.weight.1"] in groups(factors, 3)


def test_position_biases_tie_the_heads_of_all_layers_of_a_stack() -> None:
    _, factors = analysed("t5")
    heads = groups(factors, 6)
    stacks = [{dim.split(".layer.")[0].rsplit(".", 1)[0] for dim in dims} for dims in heads]
    assert stacks == [{"encoder.block"}, {"decoder.block"}, {"decoder.block"}]
    assert [any("relative_attention_bias" in dim for dim in dims) for dims in heads] == [True, True, False]


def test_experts_share_a_class_and_their_fused_feed_forward_is_pieces_and_width() -> None:
    _, factors = analysed("mixtral")
    experts = [dims for dims in groups(factors, 5) if any("gate_up_proj" in dim for dim in dims)]
    prefix = "model.layers.0.mlp.experts."
    assert short(experts[0], prefix) == ["gate_up.0", "down.0"]
    assert short(groups(factors, 112)[0], prefix) == ["gate_up.1", "down.2"]


def test_rows_of_routed_tokens_pass_and_counts_are_partial() -> None:
    graph, factors = analysed("mixtral")
    (batch,) = [cls for cls in factors.classes if cls.is_batch]
    for node in graph.graph.nodes:
        if factors.is_op(node):
            assert batch not in factors.op(node).whole, node
    grouped = [factors.op(n) for n in graph.graph.nodes if "grouped_mm" in str(n.target)]
    assert [op.counted for op in grouped] == [{2}] * 4


def test_channels_of_a_convolution_go_through_batch_norm() -> None:
    _, factors = analysed("conv")
    assert groups(factors, 12) == [
        ["stem.0.weight.0", "stem.0.bias.0", "stem.1.weight.0", "stem.1.bias.0", "body.0.weight.1"]
    ]
    assert ["body.0.weight.0", "body.0.bias.0", "body.1.weight.0", "body.1.bias.0", "head.weight.1"] in groups(
        factors, 20
    )


def test_batch_norm_in_training_keeps_rows_whole() -> None:
    graph, factors = analysed("conv")
    (batch,) = [cls for cls in factors.classes if cls.is_batch]
    whole = {str(n.target) for n in graph.graph.nodes if factors.is_op(n) and batch in factors.op(n).whole}
    assert whole == {"aten._native_batch_norm_legit_functional.default"}


def test_a_mean_loss_reduces_its_rows_as_an_average() -> None:
    graph, factors = analysed("vit")
    loss = factors.op(graph.loss)
    (batch,) = [cls for cls in factors.classes if cls.is_batch]
    assert (loss.averaged, loss.reduced) == ({batch}, {batch} | loss.sharded)
    assert [cls.size for cls in loss.sharded] == [13]


def test_a_bias_is_additive_where_the_summed_factor_may_be_cut() -> None:
    graph, factors = analysed("gpt2")
    ops = [factors.op(node) for node in graph.graph.nodes if str(node.target) == "aten.addmm.default"]
    assert all(op.additive == {0} and len(op.reduced) >= 1 for op in ops)


def test_literal_sizes_name_the_classes_they_are_the_product_of() -> None:
    graph, factors = of(lambda x: (x + FIXED).view(-1, 6, 8).reshape(-1, 48), torch.randn(5, 48))
    view, reshape = (node for node in graph.graph.nodes if "view" in str(node.target) or "shape" in str(node.target))
    sizes = {arg.path: [cls.size for cls in arg.classes] for arg in factors.op(view).size_args}
    assert sizes == {(1, 0): [None], (1, 1): [6], (1, 2): [8]}
    assert [cls.size for cls in factors.op(reshape).size_args[1].classes] == [6, 8]


def test_sizes_that_do_not_refine_keep_the_op_whole() -> None:
    graph, factors = of(lambda x: (x + FIXED.view(2, 4, 6)[0]).view(-1, 6, 4) * 2, torch.randn(5, 4, 6))
    *_, view = (node for node in graph.graph.nodes if "reshape" in str(node.target))
    op = factors.op(view)
    assert sorted(cls.size or 0 for cls in op.whole) == [4, 4, 6, 6]
    assert not any(cls.is_batch for cls in op.whole)


def test_dims_of_contradicting_refinements_are_whole_where_they_meet() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x + FIXED[:24], y + FIXED[:24]
        return x.view(-1, 4, 6).transpose(1, 2).reshape(-1, 24) + y.view(-1, 6, 4).transpose(1, 2).reshape(-1, 24)

    graph, factors = of(both, torch.randn(5, 24), torch.randn(5, 24))
    *_, add = (node for node in graph.graph.nodes if "add" in str(node.target))
    assert sorted(cls.size or 0 for cls in factors.op(add).whole) == [4, 4, 6, 6]


def test_equal_sizes_that_no_op_relates_are_different_classes() -> None:
    graph, factors = of(lambda x, y: (x * 2).sum(1) + (y * 3).sum(1), torch.randn(5, 8), torch.randn(5, 8))
    x, y = (factors.dims(leaf.node) for leaf in graph.leaves)
    assert x[0] == y[0]
    assert x[1] != y[1]


def test_dims_of_size_one_have_no_class() -> None:
    graph, factors = of(lambda x: x.sum(1, keepdim=True) + x, torch.randn(5, 8))
    total = next(node for node in graph.graph.nodes if "sum" in str(node.target))
    assert factors.dims(total)[1] == ()


def test_asking_for_what_is_not_there_is_refused() -> None:
    graph, factors = of(lambda x: torch.stack(x.unbind(1)) * 2, torch.randn(5, 4))
    unbind = next(node for node in graph.graph.nodes if "unbind" in str(node.target))
    (leaf,) = graph.leaves
    with pytest.raises(DeductionError, match="has 4 tensor values\nhint: use one of its getitem nodes"):
        factors.dims(unbind)
    with pytest.raises(DeductionError, match="is no op on tensors"):
        factors.op(leaf.node)
    with pytest.raises(DeductionError, match="does not occur once in dim 1"):
        factors.sub_factor(leaf.node, 1, factors.dims(leaf.node)[0][0])
