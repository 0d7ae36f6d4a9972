"""The graph for inference as ONNX: other runtimes give the model's outputs; what is missing is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetu_fx
from hetu_fx.errors import ExportError
from hetu_fx.export import onnx_file
from hetu_fx.plans.plan import Plan
from tests.export.test_load import contents_of
from tests.export.test_single import Tagger, batch_of


def parallel() -> Any:
    torch.manual_seed(0)
    return hetu_fx.auto_parallelize(Tagger(), batch_of(), plan=Plan.single())


def test_onnxruntime_gives_the_models_outputs(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = parallel()
    model.hetu.export(tmp_path / "export", onnx=True)
    path = tmp_path / "export" / "single" / "inference.onnx"
    session = runtime.InferenceSession(path)
    assert [given.name for given in session.get_inputs()] == ["tokens"]
    module = torch.export.load(path.with_suffix(".pt2")).module()
    for rows, length in ((3, 8), (1, 2)):
        tokens = torch.randint(0, 11, (rows, length))
        (logits,) = session.run(["logits"], {"tokens": tokens.numpy()})
        torch.testing.assert_close(torch.from_numpy(logits), module(tokens=tokens)["logits"].detach())
    for told in (str(Path(hetu_fx.__file__).parent), str(Path(torch.__file__).parent), str(tmp_path), ".py"):
        assert told.encode() not in contents_of(path)[0][1]


def test_packages_that_are_missing_are_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "NEEDED", ("onnx_that_nobody_has",))
    with pytest.raises(ExportError, match=r"needs onnx_that_nobody_has(.|\n)*hint: pip install 'hetu-fx\[onnx\]'"):
        parallel().hetu.export(tmp_path / "export", onnx=True)
    monkeypatch.setattr(onnx_file, "NEEDED", ())
    with pytest.raises(ExportError, match="weights=True"):
        parallel().hetu.export(tmp_path / "export", onnx=True, weights=False)
