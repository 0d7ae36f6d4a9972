"""Products beside communication: what they make, on ranks that are threads, and in which order they do it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hetu_fx.base.dtypes import as_reals
from hetu_fx.comm_ops.ops.product_from_factors import PRODUCTS_BY_NAME
from hetu_fx.comm_ops.ops.table import FUSED_OPS
from hetu_fx.comm_ops.wire.collectives import Exchange
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.threads import ThreadTransport, run_in_threads
from hetu_fx.errors import CommError

LINEAR = "aten.linear.default"
DTYPES = torch.float64, torch.complex128
NAMES = (LINEAR, "aten.mm.default", "aten.addmm.default")
RANKS, SIZES, WIDTHS = [0, 1, 2], [5, 0, 2], [4, 3, 1]
"""Of every rank its part of the rows, in their second dim, and of what products cut."""
SLICES = ["", "3 from 6"]
FORMS = ["", "nodes 0,0,1 from 0", "padded below 1000000"]
GATHERED, SUMMED = torch.ops.hetu.gathered_products, torch.ops.hetu.summed_product


def given(
    name: str, wide: int, narrow: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Make rows, and two weights and biases, as a product wants them."""
    made = partial(torch.randn, dtype=dtype, requires_grad=True)
    torch.manual_seed(2)
    x = made(2, sum(SIZES), wide) if name == LINEAR else made(sum(SIZES), wide)
    weights = [made(narrow, wide) if name == LINEAR else made(wide, narrow) for _ in range(2)]
    return x, weights, [made(narrow) for _ in range(0 if name == NAMES[1] else 2)]


def alone(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def parts(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    return [alone(part) for part in x.split(list(sizes), dim)]


def gradients(leaves: Sequence[Tensor], dim: int) -> Tensor:
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(found) == len(leaves)
    return torch.cat(found, dim)


def loss(results: Sequence[Tensor]) -> Tensor:
    return torch.stack([as_reals(y).sin().sum() for y in results]).sum()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cuts", [False, True], ids=["whole rows", "gathered rows"])
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_products_of_what_all_have_or_gather_are_those_of_one_device(
    name: str, dtype: torch.dtype, slices: str, cuts: bool, form: str
) -> None:
    x, weights, biases = given(name, 6, sum(WIDTHS), dtype)
    dim, out, act = x.dim() - 2, int(name != LINEAR), PRODUCTS_BY_NAME[name].call
    expected = [act(x, w, biases[i] if biases else None) for i, w in enumerate(weights)]
    loss(expected).backward()
    own_x = parts(x, SIZES, dim) if cuts else [alone(x) for _ in RANKS]
    own_w, own_b = [parts(one, WIDTHS, out) for one in weights], [parts(one, WIDTHS, 0) for one in biases]

    def of_rank(table: GroupTable) -> list[Tensor]:
        ends = ([one[table.rank] for one in of] for of in (own_w, own_b))
        with using(table):
            found = GATHERED(own_x[table.rank], *ends, name, RANKS, dim, SIZES if cuts else [], form, slices)
            loss(found[:2]).backward()
        return [y.detach() for y in found[:2]]

    for rank, found in enumerate(run_in_threads(len(RANKS), of_rank)):
        for y, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(y, whole.split(WIDTHS, -1)[rank])
    torch.testing.assert_close(gradients(own_x, dim) if cuts else own_x[2].grad, x.grad)
    for one, own in zip([*weights, *biases], [*own_w, *own_b], strict=True):
        torch.testing.assert_close(gradients(own, out if one.dim() > 1 else 0), one.grad)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cuts", [False, True], ids=["whole rows", "scattered rows"])
@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_product_whose_summands_ranks_make_is_that_of_one_device(
    name: str, dtype: torch.dtype, slices: str, cuts: bool, form: str
) -> None:
    x, (weight, _), biases = given(name, sum(WIDTHS), 6, dtype)
    dim, act, bias = x.dim() - 2, PRODUCTS_BY_NAME[name].call, biases[0] if biases else None
    expected = act(x, weight, bias)
    loss([expected]).backward()
    own_x, own_w = parts(x, WIDTHS, -1), parts(weight, WIDTHS, int(name == LINEAR))
    own_b = None if bias is None else alone(bias)  # the first rank adds it

    def of_rank(table: GroupTable) -> Tensor:
        here = table.rank
        ends = own_w[here], None if own_b is None else own_b if here == 0 else torch.zeros_like(own_b)
        with using(table):
            layout = RANKS, dim, SIZES if cuts else [], form
            y = SUMMED(own_x[here], *ends, name, "duplicate", *layout, slices)
            loss([y]).backward()
        return y.detach()

    found = run_in_threads(len(RANKS), of_rank)
    for rank, y in enumerate(found):
        torch.testing.assert_close(y, expected.split(SIZES, dim)[rank] if cuts else expected)
    torch.testing.assert_close(gradients(own_x, -1), x.grad)
    torch.testing.assert_close(gradients(own_w, int(name == LINEAR)), weight.grad)
    if bias is not None and own_b is not None:
        torch.testing.assert_close(own_b.grad, bias.grad)


def test_gradients_have_gradients_where_that_is_asked_for() -> None:
    x, weights, _ = given(LINEAR, 6, sum(WIDTHS))

    def penalty(of: Tensor, results: Sequence[Tensor]) -> None:
        (gradient,) = torch.autograd.grad(loss(results), of, create_graph=True)
        gradient.pow(2).sum().backward()

    penalty(x, [torch.nn.functional.linear(x, w) for w in weights])
    own_w = [parts(one, WIDTHS, 0) for one in weights]
    for sizes in ([], SIZES):
        own_x = parts(x, SIZES, 1) if sizes else [alone(x) for _ in RANKS]

        def of_rank(table: GroupTable, sizes: list[int] = sizes, own_x: list[Tensor] = own_x) -> None:
            with using(table):
                ends = [one[table.rank] for one in own_w]
                found = GATHERED(own_x[table.rank], ends, [], LINEAR, RANKS, 1, sizes, "", "")
                penalty(own_x[table.rank], found[:2])

        run_in_threads(len(RANKS), of_rank)
        torch.testing.assert_close(gradients(own_x, 1) if sizes else own_x[1].grad, x.grad)


Events = list[str]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Note what rank 0 does: which products it makes, which messages it starts, and for which it waits."""
    noted: Events = []
    product, post, wait = PRODUCTS_BY_NAME[LINEAR], ThreadTransport.post, Exchange.wait

    def noting(what: str, act: Any, is_mine: Any = lambda *_: True) -> Any:
        def noted_act(*args: Any, **options: Any) -> Any:
            if is_mine(*args):
                noted.append(what)
            return act(*args, **options)

        return noted_act

    by_rank_0 = {name: (lambda self, *_: self._rank == 0) for name in ("post",)}
    monkeypatch.setattr(ThreadTransport, "post", noting("start", post, by_rank_0["post"]))
    monkeypatch.setattr(Exchange, "wait", noting("wait", wait, lambda self: bool(self.works) and self.table.rank == 0))
    for name, told_by in {"call": 0, "of_input": 0, "add_of_input": 1, "of_weight": 0}.items():
        is_mine = lambda *given, at=told_by: bool(given[at].flatten()[0] == 1)  # noqa: E731
        act = noting(name, getattr(product, name), is_mine)
        product = product._replace(**{name: act})
    monkeypatch.setitem(PRODUCTS_BY_NAME, LINEAR, product)
    return noted


def of_rank(table: GroupTable, *shape: int) -> Tensor:
    """Make a tensor by which products of rank 0 are told."""
    return torch.full(shape, float(table.rank + 1), requires_grad=True)


def test_the_sum_of_gradients_of_rows_travels_while_those_of_weights_are_made(events: Events) -> None:
    def run(table: GroupTable) -> None:
        with using(table):
            x, weights = of_rank(table, 4, 3), [of_rank(table, 2, 3) for _ in range(2)]
            results = GATHERED(x, weights, [], LINEAR, [0, 1], 0, [], "", "")
            torch.autograd.backward(results, [of_rank(table, 4, 2).detach() for _ in results])

    run_in_threads(2, run)
    assert events == ["call", "call", "of_input", "add_of_input", "start", "of_weight", "of_weight", "wait"]


def test_a_slice_is_made_while_the_sum_of_the_one_before_travels(events: Events) -> None:
    def run(table: GroupTable) -> None:
        with using(table):
            SUMMED(of_rank(table, 6, 3), of_rank(table, 2, 3), None, LINEAR, "duplicate", [0, 1], 0, [], "", "3 from 6")

    run_in_threads(2, run)
    assert events == ["call", "start", "call", "start", "call", "start", "wait", "wait", "wait"]


def test_what_is_here_is_multiplied_while_slices_travel_and_each_when_it_has_come(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast = ThreadTransport.broadcast

    def noting(self: ThreadTransport, *args: Any) -> Any:
        events.extend(["start"] * (self._rank == 0))
        return broadcast(self, *args)

    monkeypatch.setattr(ThreadTransport, "broadcast", noting)

    def run(table: GroupTable) -> None:
        with using(table):
            x = torch.ones(4, 3) if table.rank == 0 else torch.zeros(2, 3)
            x[:, 1:] = 5.0
            GATHERED(x, [of_rank(table, 2, 3)], [], LINEAR, [0, 1], 0, [4, 2], "", "2 from 6")

    run_in_threads(2, run)
    # Rank 1's rows begin with 0, so only those of rank 0 are noted: its own here, and both slices of it there.
    assert events[:5] == ["start"] * 4 + ["call"]
    assert [event for event in events if event == "wait"] == ["wait", "wait"]
    assert events.index("wait") > events.index("call")


def test_nothing_travels_back_where_no_gradient_of_rows_is_wanted(events: Events) -> None:
    def run(table: GroupTable) -> None:
        with using(table):
            x, weight = of_rank(table, 4, 3).detach(), of_rank(table, 2, 3)
            (y,) = GATHERED(x, [weight], [], LINEAR, [0, 1], 0, [], "", "")
            y.backward(of_rank(table, 4, 2).detach())
            assert weight.grad is not None

    run_in_threads(2, run)
    assert events == ["call", "of_weight"]


@pytest.mark.parametrize("biased", [False, True])
def test_torch_accepts_the_registrations(biased: bool) -> None:
    x, weights, biases = given(LINEAR, 6, 4)
    for sizes in ([], [7]):
        layout = [0], 1, sizes, "", "2 from 4"
        torch.library.opcheck(GATHERED.default, (x, weights, biases if biased else [], LINEAR, *layout))
        ends = weights[0], biases[0] if biased else None
        torch.library.opcheck(SUMMED.default, (x, *ends, LINEAR, "duplicate", *layout))


def test_the_backward_alone_has_no_gradient() -> None:
    with pytest.raises(CommError, match="create_graph"):
        FUSED_OPS["gathered_products_backward"].backward((), (), ())
