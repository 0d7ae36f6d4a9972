"""Ring attention of every position, played in threads of one process, against attention on one device."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from hetu_fx.comm_ops.ops import ring_attention_block
from hetu_fx.comm_ops.ops.attention_runs import token_places
from hetu_fx.comm_ops.ops.ring_attention import Attention, Message
from hetu_fx.comm_ops.ops.ring_attention_block import Places, Ring

SIZES = [(3, 3), (5, 2, 1), (0, 4, 3), (2, 0, 5, 0), (1, 1, 1, 1), (7, 0), (6,)]
attention = torch.nn.functional.scaled_dot_product_attention


class Wires:
    """Carries messages between threads; counts those between each pair of positions."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], queue.Queue[Tensor]] = {}
        self.carried: list[tuple[int, int, int]] = []

    def box(self, *key: int) -> queue.Queue[Tensor]:
        return self.boxes.setdefault(key, queue.Queue())  # one and the same, whichever thread comes first

    def at(self, position: int) -> InProcess:
        return InProcess(self, position)


class InProcess:
    """One position's end of the wires."""

    def __init__(self, wires: Wires, position: int) -> None:
        self.wires, self.position = wires, position

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        for peer, tag, x in sends:
            self.wires.carried.append((self.position, peer, x.numel()))
            self.wires.box(self.position, peer, tag).put(x.clone())

        def wait() -> None:
            for peer, tag, x in receives:
                x.copy_(self.wires.box(peer, self.position, tag).get(timeout=300))

        return wait


def whole(heads: int, length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 6, length, 8), (2, heads, length, 8), (2, heads, length, 8))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def masks(length: int) -> dict[str, Tensor | None]:
    """Of choices (some queries have none), of what is added, of one row for all queries, and none."""
    torch.manual_seed(1)
    chosen = torch.rand(2, 1, length, length) < 0.6
    chosen[0, 0, 0] = False
    added = torch.randn(6, length, length, dtype=torch.float64)
    added = added.masked_fill(torch.rand(length, length) < 0.2, -torch.inf)
    return {"none": None, "chosen": chosen, "added": added, "padding": torch.rand(2, 1, 1, length) < 0.7}


def played(
    ring: Ring,
    given: Sequence[Tensor],
    mask: Tensor | None,
    gradient: Tensor,
    scale: float | None = None,
    places: Tensor | None = None,
) -> tuple[list[Tensor], Wires]:
    """Run every position forward and backward; return result, gradients of queries, keys and values, and the wires."""
    split = [x.detach().split(sizes, -2) for x, sizes in zip(given, (ring.queries, ring.keys, ring.keys), strict=True)]
    rows = gradient.split(ring.queries, -2)
    wires = Wires()

    def run(position: int) -> tuple[Any, ...]:
        own = mask if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 else mask.split(ring.queries, -2)[position]
        at = None if places is None else Places(places.split(ring.queries, 1)[position], places)
        mine = Attention(ring, position, *(x[position] for x in split), own, scale, at)
        out, lse = mine.forward(wires.at(position).start)
        return out, *mine.backward(rows[position], out, lse, wires.at(position).start)

    with ThreadPoolExecutor(len(ring.keys)) as pool:
        found = list(pool.map(run, range(len(ring.keys))))
    return [torch.cat(parts, -2) for parts in zip(*found, strict=True)], wires


def check(ring: Ring, heads: int, mask: Tensor | None, limit: float = 1e-12, scale: float | None = None) -> Wires:
    given = whole(heads, sum(ring.keys))
    expected = attention(*given, attn_mask=mask, is_causal=ring.is_causal, enable_gqa=heads < 6, scale=scale)
    gradient = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, given, gradient)]
    found, wires = played(ring, given, mask, gradient, scale)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)
    return wires


@pytest.fixture(params=["fused", "written out", "in pieces"], autouse=True)
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "fused":
        monkeypatch.setattr(ring_attention_block, "_is_fused", lambda query, part: False)
    if request.param == "in pieces":
        monkeypatch.setattr(ring_attention_block, "_SCORES", 30)


@pytest.mark.parametrize("heads", [6, 3])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_parts_of_any_size_give_values_and_gradients_of_the_whole(
    sizes: tuple[int, ...], is_causal: bool, heads: int
) -> None:
    check(Ring(sizes, sizes, is_causal), heads, None)
    check(Ring(sizes, sizes, is_causal), heads, None, scale=0.3)


@pytest.mark.parametrize("kind", ["chosen", "added", "padding"])
@pytest.mark.parametrize("sizes", SIZES)
def test_masks_are_cut_by_queries_and_read_by_keys(sizes: tuple[int, ...], kind: str) -> None:
    check(Ring(sizes, sizes), 3, masks(sum(sizes))[kind])


@pytest.mark.parametrize("keys", [(4, 4, 1), (1, 0, 8), (3, 3, 3)])
def test_keys_may_be_cut_elsewhere_than_queries(keys: tuple[int, ...]) -> None:
    check(Ring((2, 5, 2), keys, is_causal=True), 6, None)
    check(Ring((2, 5, 2), keys), 6, masks(9)["chosen"])


def test_queries_need_no_heads_and_masks_no_rows() -> None:
    ring, mask = Ring((4, 2, 3), (4, 2, 3)), torch.arange(9) % 3 > 0
    torch.manual_seed(0)
    given = [torch.randn(2, 9, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    expected = attention(*given, attn_mask=mask.unsqueeze(0))
    gradient = torch.randn_like(expected)
    for given_mask in (mask, mask.unsqueeze(0)):
        found, _ = played(ring, given, given_mask, gradient)
        wanted = [expected, *torch.autograd.grad(expected, given, gradient, retain_graph=True)]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    ring = Ring((5, 2, 4), (5, 2, 4), is_causal=True)
    given = whole(3, 11, dtype)
    gradient = torch.randn(2, 6, 11, 8).to(dtype)
    found, _ = played(ring, given, None, gradient)
    assert {x.dtype for x in found} == {torch.float32}
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = attention(*exact, is_causal=True, enable_gqa=True)
    limit = 1e-5 if dtype is torch.float32 else 3e-2
    for one, other in zip(found, [expected, *torch.autograd.grad(expected, exact, gradient.double())], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=limit, atol=limit)


def test_no_part_goes_further_than_its_last_reader() -> None:
    four = (2, 2, 2, 2)
    of_part = 2 * 2 * 3 * 2 * 8  # keys and values
    everybody, causal = check(Ring(four, four), 3, None), check(Ring(four, four, is_causal=True), 3, None)
    assert len(everybody.carried) == 4 * 3 + 4 * (3 + 4)
    assert len(causal.carried) == 6 + 6 + 6 + 3
    assert {numel for *_, numel in (*everybody.carried, *causal.carried)} == {of_part}
    assert not check(Ring((0, 4), (4, 0), is_causal=False), 3, None).carried == []
    assert check(Ring((4, 0), (4, 0)), 3, None).carried == []


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_several_sequences_stay_apart(sizes: tuple[int, ...], is_causal: bool) -> None:
    """The second sequence of the first row begins at its token 2, that of the second at 3."""
    length, ring = sum(sizes), Ring(sizes, sizes, is_causal)
    number = (torch.arange(length) >= torch.tensor([[2], [3]])).long()
    same = (number[:, :, None] == number[:, None]).unsqueeze(1)
    given, places = whole(3, length), token_places(number)
    sees = same & torch.ones(length, length, dtype=torch.bool).tril() if is_causal else same
    expected = attention(*given, attn_mask=sees, enable_gqa=True)
    gradient = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, given, gradient)]
    found, _ = played(ring, given, None, gradient, places=places)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
