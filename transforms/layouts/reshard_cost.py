"""What a deduction's choices cost: bringing a value from one state into another, and work that all devices repeat.

A change of state costs what `resolve` makes of it, forward, and backward what it makes of the way back of the
cotangent, both by the cost functions of the communication records. On links that are not known a message takes as
long to start as 100 kB take to travel, and a device computes 1,000 FLOPs while a byte travels: ratios between those
of accelerators in one node and those of a few nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from hetu_fx.annotations.annotation import Annotation, Duplicate, Partial, Split, State, cotangent
from hetu_fx.cluster.chips import find_chip
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.plans.cost import EqualLinks, Topology
from hetu_fx.comm_ops.resolve.resolve import resolve
from hetu_fx.deduction.factors.factors import FactorMap, OpFactors
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.flow import Flow
from hetu_fx.transforms.layouts.states import AxisState, SplitOn, Summed

FLOPS_PER_SECOND = 1e13
FORWARD_AND_BACKWARD = 3  # a product's backward is two products

MEETINGS_OF_SUM = 2  # one for each turn around a ring

_LARGE = 1 << 20  # bytes of an entry, to tell the price of a byte from that of a message


TYPICAL_LINKS: Topology = EqualLinks(speed=1e10, latency=1e-5)

_Kind = Callable[[int], State]
"""The kinds of states that differ in price, each as the state of so many devices."""

_SPLIT: _Kind = partial(Split.even, 0)
_SPLIT_OTHERWISE: _Kind = partial(Split.even, 1)  # of two splits the second is another than the first


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a change of state: `fixed + per_byte * bytes` of the whole value."""

    fixed: float = 0.0
    per_byte: float = 0.0

    def __add__(self, other: Price) -> Price:
        return Price(self.fixed + other.fixed, self.per_byte + other.per_byte)


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices on the devices of tensor-parallel groups, of which the slowest counts.

    Attributes:
        groups: the devices of each group.
        num_bytes: the size of every tensor.
        topology: the links.
        sums_alone: gradients of parameters are taken to be added up one by one, as HAP prices them.
        beside: FLOPs of the products that read a value, by its bytes, where nothing else reads it; see
            `products_by_byte`.
    """

    groups: tuple[tuple[int, ...], ...]
    num_bytes: Mapping[fx.Node, float]
    topology: Topology = TYPICAL_LINKS
    sums_alone: bool = False
    beside: Mapping[fx.Node, float] = field(default_factory=dict)
    _known: dict[tuple[_Kind, _Kind, bool, bool], tuple[Price, ...]] = field(default_factory=dict)

    def change(self, node: fx.Node, state: AxisState, wanted: AxisState, *, summed: bool, trained: bool) -> float:
        """Return the seconds of bringing a value into the state that an op wants.

        `summed`: the op gives back summands of the cotangent; without `trained` no cotangent comes back at all.
        """
        if not (summed and trained) and state == wanted:
            return 0.0
        size = self.num_bytes.get(node, 0.0)
        prices = self._of(*_kinds(state, wanted), summed, trained)
        return max((price.fixed + price.per_byte * size for price in prices), default=0.0)

    def hidden(self, node: fx.Node, state: AxisState, wanted: AxisState) -> float:
        """Return the seconds of the sum of a value's cotangent that gradients of weights hide, made beside it."""
        flops = self.beside.get(node, 0.0) * self.num_bytes.get(node, 0.0)
        if not flops:
            return 0.0
        both, forward = (self.change(node, state, wanted, summed=True, trained=trained) for trained in (True, False))
        return min([both - forward, *(_hiding_seconds(flops, group, self.topology) for group in self.groups)])

    def late_sum(self, node: fx.Node) -> float:
        """Return the seconds that summands of a parameter's gradient add to the synchronisation of gradients.

        They travel with those of other parameters, so no message starts for them alone, unless `sums_alone`.
        """
        prices, size = self._of(Partial, Duplicate, False, False), self.num_bytes.get(node, 0.0)
        return max((price.per_byte * size + price.fixed * self.sums_alone for price in prices), default=0.0)

    def repeated(self, flops: float) -> float:
        """Return the seconds that it adds to run products whole on each device, forward and backward."""
        ways = max(map(len, self.groups), default=1)
        return FORWARD_AND_BACKWARD * flops * (1 - 1 / ways) / FLOPS_PER_SECOND

    def _of(self, kind: _Kind, wanted: _Kind, summed: bool, trained: bool) -> tuple[Price, ...]:
        """Return the prices of a change in all groups."""
        key = (kind, wanted, summed, trained)
        if key not in self._known:
            self._known[key] = tuple({_change(group, *key, self.topology): None for group in self.groups})
        return self._known[key]


def node_bytes(graph: Graph) -> tuple[float, ...]:
    """Return the bytes of every node's tensor at the sizes of the example batch, 0 for none and for unknown sizes."""
    return tuple(_bytes(node) for node in graph.graph.nodes)


def _bytes(node: fx.Node) -> float:
    is_tensor = meta.has_value(node) and meta.is_tensor(node)
    return max(0.0, float(meta.numel(node) * meta.dtype(node).itemsize)) if is_tensor else 0.0


def product_flops(node: fx.Node, op: OpFactors) -> float:
    """Return a multiply-add count: result elements times the factors contracted between operands; 0 for no product."""
    sizes = contracted_sizes(op)
    return 2.0 * meta.numel(node) * math.prod(size or 1 for size in sizes) if sizes else 0.0


def contracted_sizes(op: OpFactors) -> list[int | None]:
    """Return the sizes of the classes over which an op sums products of two operands; None for a symbolic one."""
    return [c.size for c in op.contracted_classes]


def travelling_work(graph: Graph, factors: FactorMap) -> tuple[float, ...]:
    """Return what each node of a graph computes with operands that may travel, at the sizes of the example batch."""
    return tuple(_travelling_flops(node, factors) for node in graph.graph.nodes)


def _travelling_flops(node: fx.Node, factors: FactorMap) -> float:
    """Return the FLOPs of the products of queries with keys and of weights with values; causal ones have half."""
    if not factors.is_op(node) or not factors.op(node).travelling:
        return 0.0
    op = factors.op(node)
    keys, values = (meta.hints(op.operands[position].node) for position in sorted(op.travelling))
    is_placed = bool(op.placed) or any(seen.placed for seen in op.apart.values())
    return 2.0 * meta.numel(node) * keys[-2] * (1 + keys[-1] / values[-1]) / (2 if is_placed else 1)


def products_by_byte(graph: Graph, factors: FactorMap, flow: Flow) -> dict[fx.Node, float]:
    """Return the FLOPs of the products that read a value, for each of its bytes, where only such read it.

    That is for values that depend on the batch, at its example sizes; the other operand of each product does not.
    """
    found = {}
    for node in filter(flow.is_mixed, graph.graph.nodes):
        readers = [user for user in node.users if user.op == "call_function"]
        if readers and all(_multiplies_weights(reader, factors, flow) for reader in readers):
            flops, size = sum(product_flops(reader, factors.op(reader)) for reader in readers), _bytes(node)
            found[node] = flops / size if size else 0.0
    return found


def _multiplies_weights(node: fx.Node, factors: FactorMap, flow: Flow) -> bool:
    """Tell whether an op is the product of one value that depends on the batch with others that do not."""
    if not factors.is_op(node) or not contracted_sizes(factors.op(node)):
        return False
    return sum(flow.through_inputs(operand.node) for operand in factors.op(node).read) == 1


def _hiding_seconds(flops: float, ranks: tuple[int, ...], topology: Topology) -> float:
    """Return how much of a sum over some ranks is hidden by products of so many FLOPs that they share."""
    if not isinstance(topology, Cluster):
        return flops / len(ranks) / FLOPS_PER_SECOND
    devices = [topology.device(rank) for rank in ranks]
    if any(find_chip(device.kind) is None for device in devices):
        return MEETINGS_OF_SUM * topology.meeting_seconds(ranks)
    return flops / len(ranks) / min(device.speed for device in devices)


def _kinds(state: AxisState, wanted: AxisState) -> tuple[_Kind, _Kind]:
    first, second = _kind(state), _kind(wanted)
    return first, _SPLIT_OTHERWISE if first == second == _SPLIT and state != wanted else second


def _kind(state: AxisState) -> _Kind:
    match state:
        case SplitOn():
            return _SPLIT
        case Summed():
            return Partial
        case _:
            return Duplicate


def _change(
    ranks: tuple[int, ...], kind: _Kind, wanted: _Kind, summed: bool, trained: bool, topology: Topology
) -> Price:
    """Price a change of a value with an entry for each pair of ranks."""
    source, target = (Annotation.on(ranks, end(len(ranks))) for end in (kind, wanted))
    back = Annotation.on(ranks, Partial(len(ranks))) if summed else cotangent(target)
    price = _one_way(source, target, back, topology)
    return price + _one_way(back, cotangent(source), cotangent(source), topology) if trained else price


def _one_way(source: Annotation, target: Annotation, back: Annotation, topology: Topology) -> Price:
    ways = len(source.ranks)
    resolution = resolve(source, target, (ways, ways), back)
    small, large = (resolution.seconds(size, topology) for size in (1, _LARGE))
    per_byte = (large - small) / (_LARGE - 1) / ways**2
    return Price(small - per_byte * ways**2, per_byte)
