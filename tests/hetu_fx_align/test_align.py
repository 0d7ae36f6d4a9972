"""Distinct ops are found and counted, honest ways keep to what is allowed, and a wrong op is found and named."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from benchmarks.align.faults import wrong_backward
from hetu_fx.errors import AlignError
from hetu_fx_align.align import runners_of
from hetu_fx_align.distinct import distinct_ops
from hetu_fx_align.interpret import graph_to_align, values_of_leaves
from hetu_fx_align.report import align_model
from hetu_fx_align.way import WAYS, Way
from tests.hetu_fx_align.nets import Net, net_and_batch, wrong

FAULTS = {
    "1 %": lambda result: result * 1.01,
    "a transposed dim": lambda result: result.transpose(0, 1).reshape(result.shape),
    "a dtype": lambda result: result.bfloat16().to(result.dtype),
}


class Averaged(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


def test_ops_that_look_the_same_are_one_and_are_counted() -> None:
    torch.manual_seed(0)
    same = Averaged(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    graph = graph_to_align(same, (torch.randn(4, 6),))
    found = distinct_ops(graph, values_of_leaves(graph, same, (torch.randn(4, 6),)))
    told = [(op.call.name, op.count, op.module, op.call.needs_gradient) for op in found]
    assert told == [
        ("aten.linear.default", 1, "0", (False, True, True)),  # the batch carries no gradient, what comes of it does
        ("aten.relu.default", 2, "1", (True,)),
        ("aten.linear.default", 1, "2", (True, True, True)),
        ("aten.linear.default", 1, "4", (True, True, True)),
        ("aten.mean.default", 1, "", (True,)),
    ]
    assert found[0].call.tensor_names == ("input", "weight", "bias")


def test_ops_have_the_values_of_the_batch() -> None:
    model, batch = net_and_batch()
    graph = graph_to_align(model, batch)
    first = distinct_ops(graph, values_of_leaves(graph, model, batch))[0].call
    assert first.name == "aten.embedding.default"
    assert torch.equal(first.tensors[1], batch["x"])
    assert not any(tensor.requires_grad for tensor in first.tensors)


def test_honest_dtypes_keep_to_what_is_allowed_each_alone_and_all_together() -> None:
    report = align_model(*net_and_batch(), [WAYS["fp64"], WAYS["fp32"], WAYS["bf16"]], {})
    assert report.is_within, report.summary()
    assert not report.overrides.ops
    fp64, fp32, bf16 = report.whole
    assert fp64.loss == pytest.approx(fp64.reference, rel=1e-12)
    assert fp32.loss == pytest.approx(fp32.reference, rel=1e-6)
    assert bf16.loss == pytest.approx(bf16.reference, rel=2e-2)
    assert {"words", "norm", "up", "down", "drop", ""} == {module.module for module in fp32.modules}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "op", ["aten.linear.default", "aten.gelu.default", "aten.layer_norm.default", "aten.add.Tensor"]
)
def test_a_wrong_op_is_found_alone_and_in_the_whole(op: str, fault: str) -> None:
    report = align_model(*net_and_batch(), [WAYS["eager"], wrong(op, FAULTS[fault])], {})
    assert {found.op.call.name for found in report.ops if not found.is_within} == {op}
    assert all(found.verdicts[0].verdict == "within" for found in report.ops)
    honest, faulty = report.whole
    assert not honest.first
    assert (faulty.first[0].direction, faulty.first[0].op) == ("forward", op)
    assert dict(report.overrides.ops) == {op: "up-cast"}


def test_the_first_module_that_drifts_is_named_forward_and_backward() -> None:
    forward = align_model(*net_and_batch(), [wrong("aten.layer_norm.default", FAULTS["1 %"])], {}).whole[0]
    assert [(drift.direction, drift.module) for drift in forward.first] == [("forward", "norm")]
    backward = align_model(*net_and_batch(), [wrong_backward("aten.layer_norm.default")], {}).whole[0]
    assert [(drift.direction, drift.module) for drift in backward.first] == [("backward", "norm")]
    assert "nets.py" in backward.first[0].line


def test_a_wrong_gradient_alone_is_found_and_names_the_argument() -> None:
    report = align_model(*net_and_batch(), [wrong_backward("aten.gelu.default")], {})
    worst = report.ops[0].verdicts[0].worst
    assert worst is not None
    assert (report.ops[0].op.call.name, worst.what) == ("aten.gelu.default", "gradient of self")
    assert worst.error == pytest.approx(1e-2, rel=1e-3)
    assert worst.cosine == pytest.approx(1.0)


def test_an_op_that_a_way_cannot_run_fails_and_is_to_run_on_the_host() -> None:
    def refuse(result: Tensor) -> Tensor:
        raise NotImplementedError("this kind has no gelu")

    report = align_model(*net_and_batch(), [WAYS["eager"], wrong("aten.gelu.default", refuse)], {})
    verdict = report.ops[0].verdicts[1]
    assert (verdict.verdict, verdict.says) == ("fails", "NotImplementedError: this kind has no gelu")
    assert dict(report.overrides.ops) == {"aten.gelu.default": "on host"}
    assert report.whole[1].says == "NotImplementedError: this kind has no gelu"


def test_a_way_that_makes_another_dtype_or_shape_differs() -> None:
    other = align_model(*net_and_batch(), [WAYS["eager"], wrong("aten.gelu.default", Tensor.double)], {}).ops[0]
    assert other.verdicts[1].says == "makes torch.float64 where eager makes torch.float32"
    flat = wrong("aten.embedding.default", lambda result: result.flatten(0, 1).unsqueeze(0))
    turned = align_model(*net_and_batch(), [flat], {})
    assert turned.ops[0].op.call.name == "aten.embedding.default"
    told = turned.to_json()
    assert told["ops"][0]["ways"][0]["findings"][0]["error"] is None  # infinite, which JSON cannot say
    assert "Infinity" not in json.dumps(told)


def test_a_tolerance_by_op_takes_the_place_of_the_tables() -> None:
    ways = [wrong("aten.gelu.default", FAULTS["1 %"])]
    assert all(op.is_within for op in align_model(*net_and_batch(), ways, {"aten.gelu.default": 0.02}).ops)


def test_compiled_ops_are_compared_with_eager_ones() -> None:
    ways = [WAYS["eager"], Way("compiled", backend="aot_eager")]
    report = align_model(*net_and_batch(), ways, {})
    assert report.is_within, report.summary()
    assert not any(verdict.says for op in report.ops for verdict in op.verdicts)


def test_what_an_op_writes_to_is_not_seen_by_others() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.relu = nn.BatchNorm2d(3), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.norm(x)).square().mean()

    torch.manual_seed(0)
    report = align_model(InPlace(), (torch.randn(4, 3, 5, 5),), [WAYS["fp32"]], {})
    assert report.is_within, report.summary()
    assert any("relu" in op.op.call.name for op in report.ops)


def test_the_model_is_left_as_it_was() -> None:
    model, batch = net_and_batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    align_model(model, batch, [WAYS["bf16"]], {})
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_are_zero_but_for_rounding_do_not_differ() -> None:
    class OneKey(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            key = self.key(x[:, :1]).unsqueeze(1)
            return nn.functional.scaled_dot_product_attention(self.query(x).unsqueeze(1), key, key).square().mean()

    torch.manual_seed(0)
    report = align_model(OneKey(), (torch.randn(4, 5, 6),), [WAYS["fp32"], WAYS["bf16"]], {})
    assert report.is_within, report.summary()


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(AlignError, match="returns no loss"):
        align_model(nn.Linear(3, 2), (torch.randn(4, 3),), [WAYS["fp32"]], {})


@pytest.mark.parametrize("ways", [[], [WAYS["fp32"], WAYS["fp32"]]])
def test_ways_must_be_different(ways: list[Way]) -> None:
    with pytest.raises(AlignError, match="give different ones"):
        runners_of(ways)


def test_the_net_has_ops_of_several_classes() -> None:
    model, batch = net_and_batch()
    assert isinstance(model, Net)
    classes = {op.to_json()["class"] for op in align_model(model, batch, [WAYS["fp32"]], {}).ops}
    assert classes >= {"move", "pick", "product", "norm", "reduction", "pointwise"}
