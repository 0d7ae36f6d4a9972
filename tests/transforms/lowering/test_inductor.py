"""Inductor's blocks give the numbers of the graph as it is; their kernels are one library, for all sizes."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hetu_fx.transforms.lowering.lower import lower
from tests.transforms.lowering.test_block_modules import WIDTH, Cut, Tower

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++")


@pytest.mark.parametrize("recompute", [0, 2])
def test_blocks_of_any_rows_give_the_same_numbers_and_gradients(
    recompute: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    made = Cut(Tower(8, 8, p=0.4).double(), recompute)
    fixed = [slot.name in made.parameters for slot in made.device.slots]
    function, libraries = lower(made.cut, "inductor", fixed), []
    fails = recompute and torch.__version__.startswith("2.14.")  # at one row: it runs uncompiled
    for rows in (4, 7, 1):
        x = torch.randn(rows, WIDTH).double()
        with pytest.warns(match="uncompiled") if fails and rows == 1 else nullcontext():
            expected, found = (made.gradients(run, x) for run in (made.whole.forward, function))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        libraries.append(len({path.resolve() for path in tmp_path.glob("hetu_fx/*.so")}))
    assert libraries == [1, 1, 1 if fails else 2], "sizes of 1 have code of their own"
