"""Ways are rows of a table; each takes tensors as it says, and a wrong name is told with the nearest."""

from __future__ import annotations

import pytest
import torch

from hetu_fx.errors import AlignError
from hetu_fx_align.call import Call
from hetu_fx_align.tolerances import BASE, CLASSES, allowed, class_of
from hetu_fx_align.way import DTYPES, WAYS, Runner, Way, dtype_named, way_named

aten = torch.ops.aten


def test_every_way_is_found_by_its_name() -> None:
    assert all(way_named(name).name == name for name in WAYS)
    assert all(dtype_named(name) is dtype for name, dtype in DTYPES.items())


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(AlignError, match=r"no way 'inductr' to run ops \(did you mean 'inductor'\?\)"):
        way_named("inductr")
    with pytest.raises(AlignError, match=r"'bf61' is not known \(did you mean 'bf16'\?\)"):
        dtype_named("bf61")


def test_a_way_casts_real_numbers_alone_and_keeps_numbers_in_its_range() -> None:
    call = Call.of(aten.masked_fill.Scalar, (torch.ones(3), torch.tensor([True, False, True]), -3.4028234e38), {})
    made = WAYS["bf16"].adapt_call(call)
    assert [tensor.dtype for tensor in made.tensors] == [torch.bfloat16, torch.bool]
    assert made.leaves[2] == torch.finfo(torch.bfloat16).min
    assert WAYS["eager"].adapt_call(call) is call


def test_a_replaced_op_runs_in_its_place_and_others_run_as_they_are() -> None:
    runner = Runner(Way("other", replaced={"aten.neg.default": lambda op, x: op(x) - 1}))
    x = torch.tensor([2.0])
    assert runner.run(Call.of(aten.neg.default, (x,), {})) == -3
    assert runner.run(Call.of(aten.abs.default, (-x,), {})) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(AlignError, match="way 'cuda' needs the device 'cuda'"):
        Runner(WAYS["cuda"])


def test_a_distinct_call_is_compiled_once() -> None:
    runner = Runner(WAYS["aot_eager"])
    for value in (1.0, 2.0):
        assert runner.run(Call.of(aten.exp.default, (torch.full((3,), value),), {})).allclose(torch.tensor(value).exp())
    runner.run(Call.of(aten.exp.default, (torch.ones(4),), {}))
    assert len(runner._compiled) == 2


def test_ops_are_in_one_class_each_and_dtypes_have_tolerances() -> None:
    named = [op for kind in CLASSES for op in kind.ops]
    assert len(named) == len(set(named))
    assert class_of(aten.linear.default).name == "product"
    assert class_of(aten.silu.default).name == "pointwise"  # as all that no class names
    for dtype in BASE:
        rounding = torch.finfo(dtype).eps / 2
        assert rounding < allowed(class_of(aten.silu.default), dtype, backward=False) < 1e-2
        assert allowed(class_of(aten.view.default), dtype, backward=False) == 0.0
