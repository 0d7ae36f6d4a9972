"""Random numbers by counter: every element's number comes from (seed, step, site, its index in the whole tensor).

`hetu::uniform` draws, `hetu::dropout` drops. Both make just the part of the whole tensor that the local tensor
is, so a mask does not depend on the plan; backward makes the mask again instead of keeping it.

The index of an element is hashed dim by dim (splitmix64: multiply-xorshift rounds on a counter), so the sizes of
other dims and of the batch play no part. Where the local part of a dim begins is said by:

- `state`: int64[3] on the cpu: seed, step, index of the first row in the global batch;
- `rows`: four numbers (dim, length, inner, own) where rows of a batch are in a dim, which is (outer, rows, inner) in
  the whole tensor: `length` of its indices are one row's, `inner` of them side by side; `own` is 0 where each device
  has all rows, else 1;
- `cut`: five numbers (dim, start, part, whole, inner) for each dim that is cut over devices: the dim is (outer,
  whole, inner), and the local tensor has `part` indices of the middle factor, from `start` on. Where a dim is cut
  twice, the inner cut comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hetu_fx.graph.calls import Size

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of the counter
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of the mantissas of dtypes
CHUNK = 1 << 16  # elements hashed at a time on a cpu, so that the rounds stay in its cache
CUT_FIELDS = 5

SIGNATURE = "Tensor state, SymInt site, SymInt[] rows, SymInt[] cut"


def random_cut(dim: int, start: Size, part: Size, whole: Size, inner: int) -> list[Size]:
    """Return the five numbers of `cut` for one dim: (outer, whole, inner), of which [start, start + part)."""
    return [dim, start, part, whole, inner]


@torch.library.custom_op("hetu::uniform", mutates_args=(), schema=f"(Tensor like, {SIGNATURE}) -> Tensor")
def uniform(like: Tensor, state: Tensor, site: int, rows: Sequence[int], cut: Sequence[int]) -> Tensor:
    """Draw from [0, 1) for every element of a tensor like `like`, whose values are not read.

    Numbers have as many digits as the dtype: with more, those next to 1 would be rounded to it.
    """
    digits = DIGITS[like.dtype]
    drawn = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    flat = drawn.reshape(-1)
    for first, bits in _hashes(like, state, site, rows, cut):
        positive = bits.bitwise_right_shift_(64 - digits).bitwise_and_((1 << digits) - 1)
        flat[first : first + len(bits)] = positive.double().mul_(2.0**-digits)
    return drawn


@uniform.register_fake
def _(like: Tensor, *_: Any) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


@torch.library.custom_op("hetu::dropout", mutates_args=(), schema=f"(Tensor x, float p, {SIGNATURE}) -> Tensor")
def dropout(x: Tensor, p: float, state: Tensor, site: int, rows: Sequence[int], cut: Sequence[int]) -> Tensor:
    """Set every element to zero with probability p, and scale the others by 1 / (1 - p)."""
    if p >= 1:
        return torch.zeros_like(x)
    dropped = torch.empty(x.numel(), dtype=torch.bool, device=x.device)
    limit = round(p * (1 << 64)) - (1 << 63)  # the share p of all signed 64-bit numbers lies below
    for first, bits in _hashes(x, state, site, rows, cut):
        torch.lt(bits, limit, out=dropped[first : first + len(bits)])
    return (x * (1 / (1 - p))).masked_fill_(dropped.view(x.shape), 0)


@dropout.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, state, *ctx.place = inputs
    ctx.save_for_backward(state)


def _drop_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (state,) = ctx.saved_tensors
    dropped = torch.ops.hetu.dropout(gradient, ctx.p, state, *ctx.place)
    return dropped, *[None] * (2 + len(ctx.place))


dropout.register_autograd(_drop_gradient, setup_context=_remember)


def _hashes(
    like: Tensor, state: Tensor, site: int, rows: Sequence[int], cut: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield 64 random bits for each element of the flat tensor, in pieces (index of the first, bits)."""
    seed, step, first_row = state.tolist()
    key = _mixed_number(_mixed_number(_mixed_number(seed) + step) + site)
    keys = torch.full((1,), _signed(key), device=like.device)
    *outer, last = like.shape or (1,)
    counted = [_counted(dim, length, first_row, rows, cut, like.device) for dim, length in enumerate((*outer, last))]
    places = [index * _STEP for index in counted]
    for place in places[:-1]:
        keys = _mix((keys[:, None] + place).reshape(-1), finish=True)
    at_once = max(1, CHUNK // max(1, last)) if like.device.type == "cpu" else max(1, len(keys))
    for first in range(0, len(keys) if last else 0, at_once):
        bits = (keys[first : first + at_once, None] + places[-1]).reshape(-1)
        yield first * last, _mix(bits, finish=False)


def _counted(
    dim: int, length: int, first_row: int, rows: Sequence[int], cut: Sequence[int], device: torch.device
) -> Tensor:
    """Return what the indices of a local dim count as in the whole dim: row by row, if it has rows."""
    index = torch.arange(length, device=device)
    for at in range(0, len(cut), CUT_FIELDS):
        cut_dim, start, part, whole, inner = cut[at : at + CUT_FIELDS]
        if cut_dim == dim and part:
            outer, rest = index // (part * inner), index % (part * inner)
            index = outer * (whole * inner) + start * inner + rest
            length = length // part * whole
    if not length or not rows or rows[0] != dim:
        return index
    _, of_row, inner, own = rows
    if inner != of_row:  # else rows are outermost, and stand as they are counted
        here = length // of_row
        index = index // inner % here * of_row + index // (here * inner) * inner + index % inner
    return index + first_row * of_row * own


def _mix(bits: Tensor, finish: bool) -> Tensor:
    """Mix in place (Python's integers do the same in `_mixed_number`).

    The last xorshift changes low bits alone; only keys for further dims need them.
    """
    moved = torch.empty_like(bits)
    for distance, kept, factor in _ROUNDS if finish else _ROUNDS[:-1]:
        torch.bitwise_right_shift(bits, distance, out=moved)
        bits.bitwise_xor_(moved.bitwise_and_(kept))
        if factor != 1:
            bits.mul_(factor)
    return bits


def _mixed_number(number: int) -> int:
    bits = (number + GOLDEN) & MASK
    bits = ((bits ^ (bits >> 30)) * FIRST) & MASK
    bits = ((bits ^ (bits >> 27)) * SECOND) & MASK
    return bits ^ (bits >> 31)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_STEP = _signed(GOLDEN)
_ROUNDS = tuple(
    (distance, (1 << (64 - distance)) - 1, _signed(factor)) for distance, factor in ((30, FIRST), (27, SECOND), (31, 1))
)
"""Of a mix: by how far bits are shifted, which of them count, and what they are multiplied by."""
