"""Calls come back from disk as they were, without pickle; what is torn or unknown is refused with the way out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from hetu_fx.errors import AlignError
from hetu_fx_align.call import Call
from hetu_fx_align.report import align_model, replay, save_worst
from hetu_fx_align.saved import read_call, save_call
from hetu_fx_align.way import WAYS
from tests.hetu_fx_align.nets import net_and_batch, wrong

aten = torch.ops.aten


def a_call() -> Call:
    weight = torch.randn(3, 4).t().requires_grad_()
    args = ([weight, torch.ones(4, 3)], 1)
    return Call.of(aten.cat.default, args, {})


@pytest.mark.parametrize(
    "call",
    [
        a_call(),
        Call.of(aten.full.default, ([2, 3], -math.inf), {"dtype": torch.float32, "device": torch.device("cpu")}),
        Call.of(aten.softmax.int, (torch.randn(2, 3, requires_grad=True), -1, None), {}),
        Call.of(aten.index.Tensor, (torch.randn(4, 3), [None, torch.tensor([0, 2])]), {}),
    ],
    ids=lambda call: call.name,
)
def test_a_call_comes_back_as_it_was(call: Call, tmp_path: Path) -> None:
    save_call(call, tmp_path / "op.json")
    read = read_call(tmp_path / "op.json")
    assert (read.name, read.needs_gradient, read.tensor_names) == (call.name, call.needs_gradient, call.tensor_names)
    assert torch.equal(read.run(), call.detached().run())
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_a_wrong_op_is_found_again_when_it_is_replayed_alone(tmp_path: Path) -> None:
    faulty = wrong("aten.gelu.default", lambda result: result * 1.01)
    save_worst(align_model(*net_and_batch(), [WAYS["fp32"], faulty], {}), tmp_path / "ops", 1)
    call = read_call(tmp_path / "ops" / "01-aten.gelu.default.json")
    honest, wrong_one = replay(call, [WAYS["fp32"], faulty], {}).ops[0].verdicts
    assert (honest.verdict, wrong_one.verdict) == ("within", "differs")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"op": "aten.sofmax.int"}, r"'aten.sofmax.int' is no op of torch \(did you mean 'aten.softmax.int'\?\)"),
        ({"format": "hetu_fx.op/9"}, "format is 'hetu_fx.op/9'"),
        ({"arg": []}, r"unknown key 'arg' \(did you mean 'args'\?\)"),
        ({"args": [{"tensor": "x9"}]}, "an argument cannot be read"),
        ({"needs_gradient": []}, "0 entries for 1 tensors"),
    ],
)
def test_a_file_that_cannot_be_is_refused(change: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "op.json"
    save_call(Call.of(aten.softmax.int, (torch.randn(2, 3), -1), {}), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(AlignError, match=says):
        read_call(path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AlignError, match="cannot read"):
        read_call(tmp_path / "op.json")
    save_call(a_call(), tmp_path / "op.json")
    (tmp_path / "op.safetensors").unlink()
    with pytest.raises(AlignError, match="cannot read the tensors"):
        read_call(tmp_path / "op.json")
