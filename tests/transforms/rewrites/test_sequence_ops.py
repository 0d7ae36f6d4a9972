"""The ops of attention per sequence: what torch makes of them, on each kind of device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from hetu_fx.comm_ops.ops.ring_attention_block import KeyValueBlock, gradients
from hetu_fx.transforms.rewrites import sequence_ops
from hetu_fx.transforms.rewrites.sequence_ops import KERNELS

ops = torch.ops.hetu
attention = torch.nn.functional.scaled_dot_product_attention
ROWS = ((3, 4, 2), (9,))


def numbers(rows: tuple[tuple[int, ...], ...] = ROWS) -> Tensor:
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def tensors(dtype: torch.dtype = torch.float64, trained: bool = True, length: int = 9) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, length, 8), (2, 2, length, 8), (2, 2, length, 8))
    return [torch.randn(shape).to(dtype).requires_grad_(trained) for shape in shapes]


def sees(number: Tensor, is_causal: bool) -> Tensor:
    same = number[:, :, None] == number[:, None]
    return (same & torch.ones(same.shape[1:], dtype=torch.bool).tril() if is_causal else same)[:, None]


class Attends(nn.Module):
    """Attention of packed rows, causal."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, number: Tensor) -> Tensor:
        places = ops.sequence_places(number)
        return ops.sequence_attention(query, key, value, None, places, places, True, None, True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_torch_accepts_the_registration(is_causal: bool) -> None:
    places, how = ops.sequence_places(numbers()), (is_causal, None)
    given = (*tensors(), None, places, places, *how)
    assert set(torch.library.opcheck(ops.sequence_attention_forward.default, given).values()) == {"SUCCESS"}
    out, lse = ops.sequence_attention_forward(*given)
    given = (out.detach(), *tensors(trained=False), None, places, places, out.detach(), lse.detach(), *how)
    check = ("test_schema", "test_faketensor")
    assert set(torch.library.opcheck(ops.sequence_attention_backward.default, given, test_utils=check).values()) == {
        "SUCCESS"
    }
    assert set(torch.library.opcheck(ops.sequence_places.default, (numbers(),), test_utils=check).values()) == {
        "SUCCESS"
    }


def test_it_goes_through_export_and_a_saved_file_with_open_sizes(tmp_path: Path) -> None:
    length = torch.export.Dim("length")
    open_sizes = {**{name: {2: length} for name in ("query", "key", "value")}, "number": {1: length}}
    given = (*tensors(trained=False), numbers())
    torch.export.save(torch.export.export(Attends(), given, dynamic_shapes=open_sizes), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    number = numbers(((2, 5), (3, 4)))
    given = (*tensors(trained=False, length=7), number)
    torch.testing.assert_close(loaded(*given), attention(*given[:3], sees(number, True), enable_gqa=True))


def test_it_compiles_with_dynamic_shapes_and_gradients() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Attends(), backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (ROWS, ((5, 1), (3, 3))):
        number = numbers(rows)
        given = tensors(length=number.shape[1])
        found = torch.autograd.grad((compiled(*given, number) ** 2).sum(), given)
        wanted = torch.autograd.grad((attention(*given, sees(number, True), enable_gqa=True) ** 2).sum(), given)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_device_without_a_kernel_attends_to_the_whole_row_under_a_mask(
    kept: bool, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_ops, "KERNELS", ())
    given, places, mask = tensors(), ops.sequence_places(numbers()), sees(numbers(), is_causal)
    found = ops.sequence_attention(*given, mask if kept else None, places, places, is_causal, None, True)
    torch.testing.assert_close(found, attention(*given, mask, enable_gqa=True), rtol=1e-12, atol=1e-12)


class FromSequences:
    """What torch's kernel for varying lengths gives, computed sequence by sequence."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: float | None) -> tuple[Any, ...]:
        starts, _, longest, _, dropout, is_causal, _ = others
        self.lengths = starts.diff().tolist()
        assert (starts.dtype, longest, dropout) == (torch.int32, max(self.lengths), 0.0)
        pieces = [x.split(self.lengths) for x in (query, key, value)]
        found = [self._attend(*one, is_causal, scale) for one in zip(*pieces, strict=True)]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1), None, None, None

    def backward(self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: Any) -> Any:
        out, lse, starts, _, _, _, _, is_causal, _, _ = others
        lengths = starts.diff().tolist()
        pieces = (x.split(lengths) for x in (gradient, query, key, value, out, lse.transpose(0, 1)))
        found = [self._gradients(*one, is_causal, scale) for one in zip(*pieces, strict=True)]
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    @staticmethod
    def _gradients(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *how: Any
    ) -> list[Tensor]:
        is_causal, scale = how
        rows = [x.transpose(0, 1)[None].double() for x in (gradient, query, key, value, out)]
        part = KeyValueBlock(rows[2], rows[3], offset=0 if is_causal else None, scale=scale)
        found = gradients(rows[0], rows[1], part, rows[4], lse.transpose(0, 1)[None].double())
        return [x[0].transpose(0, 1).bfloat16() for x in found]

    @staticmethod
    def _attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: Any) -> tuple[Tensor, Tensor]:
        query, key, value = (x.transpose(0, 1).double() for x in (query, key, value))
        key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
        scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        out = scores.softmax(-1) @ value
        return out.transpose(0, 1).bfloat16(), scores.logsumexp(-1).float()


@pytest.mark.parametrize("is_causal", [False, True])
def test_torchs_kernel_for_varying_lengths_is_given_rows_as_tokens_and_sequences(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = FromSequences()
    monkeypatch.setattr(sequence_ops.aten, "_flash_attention_forward", played.forward)
    monkeypatch.setattr(sequence_ops.aten, "_flash_attention_backward", played.backward)
    monkeypatch.setattr(
        sequence_ops, "KERNELS", tuple(_on_cpu(kernel) for kernel in KERNELS if kernel.device == "cuda")
    )
    given, places = tensors(torch.bfloat16), ops.sequence_places(numbers())
    out = ops.sequence_attention(*given, None, places, places, is_causal, None, True)
    assert played.lengths == [3, 4, 2, 9]
    wanted = attention(*given, sees(numbers(), is_causal), enable_gqa=True)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, given, gradient)
    for one, other in zip(found, torch.autograd.grad(wanted, given, gradient), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def _on_cpu(kernel: Any) -> Any:
    return sequence_ops.SequenceKernel("cpu", lambda *_: True, kernel.forward, kernel.backward)


def test_torchs_kernel_for_varying_lengths_takes_halves_without_a_mask_on_devices_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    halves, singles = tensors(torch.bfloat16), tensors(torch.float32)
    assert sequence_ops.takes_flash(*halves, None)
    assert not sequence_ops.takes_flash(*halves, sees(numbers(), False))
    assert not sequence_ops.takes_flash(*singles, None)
    assert not sequence_ops.takes_flash(halves[0][:, :, :4], *halves[1:], None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert not sequence_ops.takes_flash(*halves, None)


def test_results_are_laid_out_as_their_fakes() -> None:
    places = ops.sequence_places(numbers())
    real = ops.sequence_attention_forward(*tensors(), None, places, places, True, None)
    with FakeTensorMode():
        fake_places = ops.sequence_places(torch.empty(2, 9, dtype=torch.int64))
        given = (torch.empty(x.shape, dtype=x.dtype) for x in tensors())
        fake = ops.sequence_attention_forward(*given, None, fake_places, fake_places, True, None)
    assert [(x.shape, x.stride(), x.dtype) for x in real] == [(x.shape, x.stride(), x.dtype) for x in fake]


def test_autocast_does_with_it_as_with_torchs_own() -> None:
    places, mask = ops.sequence_places(numbers()), sees(numbers(), is_causal=True)
    for dtype in (torch.float32, torch.float64):
        given = tensors(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            found = ops.sequence_attention(*given, None, places, places, True, None, True)
            wanted = attention(*given, mask, enable_gqa=True)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("is_causal", "pairs"), [(False, 81), (True, 40)])
def test_flops_are_those_of_the_pairs_of_tokens_that_meet(is_causal: bool, pairs: int) -> None:
    """2 rows of 4 heads: a product of 8 channels for the scores of each pair, and one for the result."""
    given = (torch.empty(x.shape, device="meta") for x in tensors())
    places = torch.empty(2, 9, 2, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        ops.sequence_attention(*given, None, places, places, is_causal, None, True)
    assert counter.get_total_flops() == 2 * 4 * pairs * 2 * (8 + 8)
