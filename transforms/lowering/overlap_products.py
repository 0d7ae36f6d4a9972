"""Let the products of a tensor parallel group run beside the communication before and after them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.ops.overlapped_products import GATHERED_PRODUCTS, SUMMED_PRODUCT
from hetu_fx.comm_ops.ops.product_from_factors import PRODUCTS_BY_NAME
from hetu_fx.comm_ops.ops.table import COMM_OPS
from hetu_fx.graph import meta
from hetu_fx.graph.calls import operand
from hetu_fx.graph.graph import Leaf, LeafKind
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph
from hetu_fx.transforms.lowering.product_calls import CASTS, Given, product_operands, uncast
from hetu_fx.transforms.lowering.slice_counts import PART, SUM, Slicing
from hetu_fx.transforms.specialize.device_graph import DeviceGraph, SlotKind


@dataclass(frozen=True)
class Overlap:
    """Make products and the communication before or after them one op, which does both at a time.

    Requires: a device graph, after recomputation and later weights, which look for products.
    Ensures: the gradients of weights are made while that of their rows is summed over the group; where rows are
        gathered first, and it pays by the prices of the cluster, the products are made in slices while others travel.
        A product whose result is summed is made in slices where that pays, and on hosts where other ranks read it.
        A sum whose gradient is summed is one op.
        What is recomputed stays in its run: a product there is not joined with what is sent, which is in none. Changes
        the graph in place.

        %x_1 = hetu.identity(%x, [0, 1])        ->      %made = hetu.gathered_products(%x, [%w_1, %w_2], ...)
        %y = aten.linear(%x_1, %w_1)                    %y = getitem(%made, 0)
        %z = aten.linear(%x_1, %w_2)                    %z = getitem(%made, 1)
        %s = aten.linear(%y, %w_3)              ->      %sum = hetu.summed_product(%y, %w_3, ..., '2 from 512')
        %sum = hetu.all_reduce(%s, [0, 1])
    """

    annotated: AnnotatedGraph
    cluster: Cluster | None = None
    on_host: bool = False
    name: ClassVar[str] = "overlap"

    def __call__(self, device: DeviceGraph) -> DeviceGraph:
        joining = _Joining(device, _Slices(device, self.annotated, self.cluster), on_host=self.on_host)
        for node in list(device.graph.nodes):
            if node.op == "call_function" and node.target in _JOINED:
                _JOINED[node.target](joining, node)
        return joining.made()


class _Slices:
    """Says in how many slices products are made."""

    def __init__(self, device: DeviceGraph, annotated: AnnotatedGraph, cluster: Cluster | None) -> None:
        stage = annotated.stage(device.layout)
        self._slicing, self._devices = None if cluster is None else Slicing(cluster, stage), set(stage.devices)
        leaves = {leaf.name: leaf for leaf in annotated.graph.leaves_of(LeafKind.PARAMETER)}
        slots = zip(device.graph.find_nodes(op="placeholder"), device.slots, strict=True)
        self._leaves = {node: leaves[slot.name] for node, slot in slots if slot.kind is SlotKind.PARAMETER}

    def of(self, ranks: Sequence[int], turns: int, weights: Sequence[fx.Node], dim: int) -> str:
        """Return the slices of products with some weights, of which rows as wide as their `dim` travel.

        By the parameters' whole shapes, which all ranks know alike; in one slice where the weights are none, and where
        replicas meet.
        """
        found = [self._leaves.get(uncast(weight)) for weight in weights]
        known = [leaf for leaf in found if leaf is not None]
        if self._slicing is None or len(known) < len(found) or not self._devices.issuperset(ranks):
            return ""
        return str(self._slicing.best(ranks, turns, sum(map(_entries, known)), meta.hints(known[0].node)[dim]))


def _entries(leaf: Leaf) -> int:
    first, second = meta.hints(leaf.node)
    return first * second


class _Joining:
    """A device's graph that is being changed, and which of its nodes stand in which run that is recomputed."""

    def __init__(self, device: DeviceGraph, slices: _Slices, *, on_host: bool) -> None:
        self._device, self._graph, self._slices, self._on_host = device, device.graph, slices, on_host
        self._runs = {node: number for number, run in enumerate(device.recomputed) for node in run}
        self._replaced: dict[fx.Node, fx.Node] = {}

    def made(self) -> DeviceGraph:
        """Return the device's graph as it is now."""
        runs: list[list[fx.Node]] = [[] for _ in self._device.recomputed]
        for node in self._graph.nodes:
            if node in self._runs:
                runs[self._runs[node]].append(node)
        differentiable = frozenset(self._replaced.get(node, node) for node in self._device.differentiable)
        return replace(self._device, recomputed=tuple(map(tuple, runs)), differentiable=differentiable)

    def whole_rows(self, sent: fx.Node) -> None:
        """Join products of rows that all have, whose gradient is summed; else let the sum that made them do so."""
        x, ranks, *form = sent.args
        if not self._gathered(sent, x, (ranks, 0, [], *(form or [""])), lambda *_: ""):
            self._summed_both_ways(sent)

    def gathered_rows(self, sent: fx.Node) -> None:
        """Join products of rows that are gathered, whose gradient is summed and scattered."""
        x, ranks, dim, sizes, _, _, cotangent, *form = sent.args
        group: Any = ranks
        if cotangent == "partial" and _is_of_rows(sent):
            layout = ranks, dim, sizes, *(form or [""])
            self._gathered(sent, x, layout, lambda weights, out: self._slices.of(group, PART, weights, 1 - out))

    def _gathered(self, sent: fx.Node, x: Any, layout: tuple[Any, ...], slices: Callable[..., str]) -> bool:
        rows, readers, given = _products_of(sent)
        if not given or len({self._runs.get(node) for node in (sent, rows, *readers)}) > 1:
            return False
        weights, biases = [weight for _, weight, _ in given], [bias for *_, bias in given if bias is not None]
        name, first = str(readers[0].target), readers[0]
        if len(biases) not in (0, len(given)) or not self._brings((*weights, *biases), first):
            return False
        cut = slices(weights, PRODUCTS_BY_NAME[name].out)
        made = self._emit(first, GATHERED_PRODUCTS.overload, x, weights, biases, name, *layout, cut)
        for number, reader in enumerate(readers):
            self._become(reader, self._emit(reader, operator.getitem, made, number))
        for node in dict.fromkeys((rows, sent)):
            self._erase(node)
        self._replaced[sent] = made
        return True

    def _summed_both_ways(self, sent: fx.Node) -> None:
        """Join a sum that all have with what sums its gradient, which would copy it."""
        total, ranks, *form = sent.args
        at = _COTANGENTS.get(total.target) if isinstance(total, fx.Node) else None
        if not isinstance(total, fx.Node) or at is None or len(total.users) > 1:
            return
        if _meeting(total) == (ranks, [], "".join(map(str, form))) and total.args[at] == "duplicate":
            total.args = *total.args[:at], "partial", *total.args[at + 1 :]
            self._become(sent, total)

    def summed(self, sent: fx.Node) -> None:
        """Join a product with the sum of its result, where slices pay, and on hosts."""
        _, ranks, cotangent, *form = sent.args
        self._summed(sent, SUM, cotangent, (ranks, 0, [], *(form or [""])), always=self._on_host)

    def scattered(self, sent: fx.Node) -> None:
        """Join a product with the sum of its result, of which each rank keeps a part, where slices pay."""
        _, ranks, dim, sizes, _, _, *form = sent.args
        if _is_of_rows(sent):
            self._summed(sent, PART, "duplicate", (ranks, dim, sizes, *(form or [""])))

    def _summed(
        self, sent: fx.Node, turns: int, cotangent: Any, layout: tuple[Any, ...], *, always: bool = False
    ) -> None:
        product = operand(sent)
        given = _given(product)
        if given is None or len(product.users) > 1 or product in self._runs:
            return
        name = str(product.target)
        cut = self._slices.of(layout[0], turns, [given[1]], PRODUCTS_BY_NAME[name].out)
        if cut or always:
            made = self._emit(sent, SUMMED_PRODUCT.overload, *given, name, cotangent, *layout, cut)
            self._become(sent, made)
            self._erase(product)

    def _emit(self, before: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
        """Add a call in front of another, which it belongs with."""
        with self._graph.inserting_before(before):
            made = self._graph.call_function(target, args)
        meta.copy_meta(before, made)
        if before in self._runs:
            self._runs[made] = self._runs[before]
        return made

    def _become(self, node: fx.Node, made: fx.Node) -> None:
        """Put a node in the place of another one."""
        node.replace_all_uses_with(made)
        self._erase(node)
        self._replaced[node] = made

    def _erase(self, node: fx.Node) -> None:
        self._runs.pop(node, None)
        self._graph.erase_node(node)

    def _brings(self, ends: Sequence[fx.Node], first: fx.Node) -> bool:
        """Let casts of leaves that products read stand before the first of them; tell whether all ends do."""
        late = [node for node in dict.fromkeys(ends) if not node < first]
        if any(uncast(node).op != "placeholder" or self._runs.get(node) != self._runs.get(first) for node in late):
            return False
        for node in late:
            first.prepend(node)
        return True


_SUM = COMM_OPS["all_reduce"].overload

_COTANGENTS: Mapping[Any, int] = {_SUM: 2, SUMMED_PRODUCT.overload: 4}
"""Of ops that sum: which argument says what becomes of the gradient."""


def _meeting(total: fx.Node) -> tuple[Any, Any, str]:
    """Return the ranks of an op that sums, the parts that its result is cut in, and its algorithm."""
    given: Sequence[Any] = total.args
    if total.target is _SUM:
        return given[1], [], "".join(given[3:])
    return given[5], given[7], given[8]


_JOINED: Mapping[Any, Callable[[_Joining, fx.Node], None]] = {
    COMM_OPS["identity"].overload: _Joining.whole_rows,
    COMM_OPS["all_gather"].overload: _Joining.gathered_rows,
    _SUM: _Joining.summed,
    COMM_OPS["reduce_scatter"].overload: _Joining.scattered,
}


def _products_of(sent: fx.Node) -> tuple[fx.Node, list[fx.Node], list[Given]]:
    """Return rows, or what they are cast to, all products that read them in order, and what those are given.

    Nothing is given where others read them too, or unlike products.
    """
    rows, *others = sent.users
    if others or rows.target not in CASTS or rows.kwargs or len(rows.args) != 2:
        rows = sent
    readers = sorted(rows.users)
    given = [found for reader in readers if (found := _given(reader)) is not None and found[0] is rows]
    alike = len({reader.target for reader in readers}) == 1 and all(rows not in found[1:] for found in given)
    return rows, readers, given if alike and len(given) == len(readers) else []


def _given(node: fx.Node) -> Given | None:
    """Return what a product of rows with a matrix is given; None for any other op."""
    given = product_operands(node)
    if given is None or meta.num_dims(given[1]) != 2 or (meta.num_dims(given[0]) or 0) < 2:
        return None
    return given


def _is_of_rows(sent: fx.Node) -> bool:
    """Tell whether parts are of a whole dim, other than the last."""
    *_, dim, _, outer, inner = sent.args[:6]
    dims = meta.num_dims(sent)
    return (outer, inner) == (1, 1) and dims is not None and isinstance(dim, int) and dim < dims - 1
