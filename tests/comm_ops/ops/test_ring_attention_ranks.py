"""Ring attention on three gloo ranks, parts of all sizes: values and gradients are those of one device."""

import pytest
import torch

from hetu_fx.comm_ops.ops.ring_attention import RING_ATTENTION
from hetu_fx.comm_ops.wire.groups import active
from tests.comm_ops.at_once import flat

attention = torch.nn.functional.scaled_dot_product_attention
PARTS = [(5, 2, 4), (0, 7, 1), (3, 0, 0), (1, 1, 1)]


def tensors(length, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = ((2, 6, length, 8), (2, 3, length, 8), (2, 3, length, 8), (2, 6, length, 8))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def same(rank, ranks, sizes, mask, is_causal):
    """Compare this rank's parts of result and gradients with those of the whole."""
    if rank not in ranks:
        return
    position = ranks.index(rank)
    wholes = tensors(sum(sizes))
    parts = [x.split(sizes, 2)[position].clone().requires_grad_() for x in wholes[:3]]
    own = None if mask is None or mask.shape[-2] == 1 else mask.split(sizes, -2)[position]
    masks = mask if own is None else own, None, None
    out, _ = RING_ATTENTION.overload(*parts, *masks, ranks, sizes, sizes, is_causal, None)
    out.backward(wholes[3].split(sizes, 2)[position])
    given = [x.clone().requires_grad_() for x in wholes[:3]]
    expected = attention(*given, attn_mask=mask, is_causal=is_causal, enable_gqa=True)
    expected.backward(wholes[3])
    for one, other in zip((out, *(x.grad for x in parts)), (expected, *(x.grad for x in given)), strict=True):
        torch.testing.assert_close(one, other.split(sizes, 2)[position], rtol=1e-12, atol=1e-12)


def check_unequal_parts(rank, world, folder):
    for sizes in map(list, PARTS):
        length = sum(sizes)
        chosen = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(1)) < 0.6
        for mask in (
            None,
            chosen,
            chosen[:, :, :1],
            torch.zeros(length, length).masked_fill(~chosen[0, 0], -9.0).double(),
        ):
            same(rank, [0, 1, 2], sizes, mask, False)
        same(rank, [0, 1, 2], sizes, None, True)


def check_ranks_in_any_order_and_some_of_them(rank, world, folder):
    same(rank, [2, 0, 1], [3, 1, 4], None, True)
    same(rank, [2, 0], [3, 4], None, True)
    same(rank, [1], [4], None, True)


def check_two_layers_one_after_the_other(rank, world, folder):
    """Messages of one op never meet those of the next, whatever rank is ahead."""
    sizes = [6, 1, 3]
    wholes = tensors(10)
    parts = [x.split(sizes, 2)[rank].clone().requires_grad_() for x in wholes[:3]]
    layout = (None, None, None, [0, 1, 2], sizes, sizes, True, None)
    first, _ = RING_ATTENTION.overload(*parts, *layout)
    second, _ = RING_ATTENTION.overload(first, parts[1] * 2, parts[2], *layout)
    second.sum().backward()
    given = [x.clone().requires_grad_() for x in wholes[:3]]
    before = attention(*given, is_causal=True, enable_gqa=True)
    attention(before, given[1] * 2, given[2], is_causal=True, enable_gqa=True).sum().backward()
    for x, other in zip(parts, given, strict=True):
        torch.testing.assert_close(x.grad, other.grad.split(sizes, 2)[rank], rtol=1e-12, atol=1e-12)
    shapes = [(2, 6, size, 8) for size in sizes]
    assert sum(x.shape[2] for x in flat([0, 1, 2], active()).gather(second.detach(), shapes).wait()) == 10


@pytest.mark.distributed
@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "check",
    [check_unequal_parts, check_ranks_in_any_order_and_some_of_them, check_two_layers_one_after_the_other],
    ids=lambda check: check.__name__,
)
def test_on_three_ranks(check, gloo_checks):
    assert gloo_checks(__file__, 3)[check.__name__] == [None] * 3
