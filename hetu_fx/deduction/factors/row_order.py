"""Prove, use by use, that a shard may order, index and count its own rows (see `rules.routing`).

Followed through the graph, per tensor: in which order the rows of each dim stand (natural, or made by one
sort), whether the values are positions of rows and in which order those rows stand, and whether the values
are a sort's keys or counts of them. A value that is used in any other way (as a number, across rows, as an
output) spoils the sorts and the counting sequences it comes from: their ops keep the general rule. What is
left may be done shard by shard, because positions made in a shard are used to index rows of that shard
only, and every row that is moved is put back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.registry import find_rule
from hetu_fx.deduction.rules.routing import ROLES, Role
from hetu_fx.deduction.rules.rule import Dim, Factoring
from hetu_fx.deduction.rules.size import Size, integer

NATURAL = 0  # the order of the single device's program
SELF = -1  # of positions: in the order that the dim of the positions itself stands in
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class KnownRows:
    """What is known of a tensor's rows and values; a tensor without it is natural and holds plain numbers.

    Attributes:
        orders: per dim the order of its rows, where it is not natural.
        points: if the values are positions of rows: the order that those rows stand in.
        size: the number of rows that the positions are among.
        keys: the order that sorted these values.
        counts: the order whose keys these values count.
        origins: the sorts and counting sequences all this comes from.
    """

    orders: Mapping[int, int] = field(default_factory=dict)
    points: int | None = None
    size: Size | None = None
    keys: int | None = None
    counts: int | None = None
    origins: frozenset[int] = frozenset()

    @property
    def is_local(self) -> bool:
        """Tell whether the tensor differs from the single device's, shard by shard."""
        return bool(self.orders) or self.points is not None

    @property
    def is_known(self) -> bool:
        """Tell whether anything is known."""
        return self.is_local or self.counts is not None


PLAIN = KnownRows()


class Misuse(Exception):
    """A value is used in a way that would give the shards away; caught by the tracker."""


@dataclass(frozen=True, slots=True)
class RowStep:
    """An op node with what is known of its operands' rows."""

    node: fx.Node
    call: Call
    factoring: Factoring
    given: tuple[KnownRows, ...]

    def with_call(self, call: Call) -> RowStep:
        """Return the step with another call, factored anew."""
        rule = find_rule(self.node.target)
        assert rule is not None, "an op with a role has a rule"
        return replace(self, call=call, factoring=rule.factor(call))

    def with_plain(self, operand: int) -> RowStep:
        """Return the step with an operand of which nothing is known."""
        return replace(self, given=(*self.given[:operand], PLAIN, *self.given[operand + 1 :]))

    def order(self, operand: int, dim: int) -> int:
        """Return the order of the rows of an operand's dim."""
        return self.given[operand].orders.get(dim, NATURAL)

    def target(self, operand: int) -> int:
        """Return the order of the rows that an operand's positions are among."""
        shape, rows = self.call.operands[operand].shape, self.given[operand]
        own = [dim for dim, size in enumerate(shape) if size.number != 1]
        if len(own) != 1 or rows.points is None:
            raise Misuse
        return self.order(operand, own[0]) if rows.points == SELF else rows.points

    def moved(
        self, consumed: Collection[Place] = frozenset(), positions: Collection[int] = frozenset()
    ) -> Sequence[KnownRows]:
        """Return the results of an op that passes rows on, in their order, and computes with their values.

        Args:
            consumed: (operand, dim) whose order ends here.
            positions: operands whose values are read as positions.
        """
        if any(rows.points is not None for i, rows in enumerate(self.given) if i not in {*positions, 0}):
            raise Misuse
        if self.given and self.given[0].points is not None and not positions:
            raise Misuse
        orders = self._orders(consumed)
        return [
            KnownRows(orders={dim: orders[names] for dim, names in enumerate(dims) if orders.get(names, NATURAL)})
            for dims in self.factoring.results
        ]

    def carried(self) -> Sequence[KnownRows]:
        """Return the results of an op that moves or casts values: they stay what they are."""
        first = self.given[0]
        plain = replace(self, given=(replace(first, points=None), *self.given[1:]))
        if first.points is not None and not self._keeps_all():
            raise Misuse
        return [replace(first, orders=rows.orders) for rows in plain.moved()]

    def _keeps_all(self) -> bool:
        """Tell whether every factor of the first operand passes through."""
        factors = frozenset(name for dim in self.factoring.operands[0] for name in dim)
        return not factors & (self.factoring.whole | self.factoring.reduced)

    def counted(self) -> Sequence[KnownRows]:
        """Return the result of counting values: which order's keys are counted."""
        return [replace(rows, counts=self.given[0].keys) for rows in self.moved()]

    def added_up(self) -> Sequence[KnownRows]:
        """Return the result of adding values up: offsets of the rows that they count."""
        return [replace(rows, counts=self.given[0].counts) for rows in self.moved()]

    def added(self) -> Sequence[KnownRows]:
        """Return the result of a sum: with the number 0, what it is added to."""
        is_same = len(self.call.operands) == 1 and self.call.arguments.get("other") == 0
        return self.carried() if is_same else self.moved()

    def divided(self) -> Sequence[KnownRows]:
        """Return positions of slots, divided by the number of slots of a row: positions of rows. Others are numbers."""
        rows, slots = self.given[0], self.call.arguments.get("other")
        if rows.points is None:
            return self.moved()
        rounds = self.call.arguments.get("rounding_mode", "floor") is not None
        if rows.size is None or rows.points != NATURAL or not isinstance(slots, int) or not rounds:
            raise Misuse
        size = rows.size.over(integer(slots))
        if size is None:
            raise Misuse
        return [replace(rows, size=size)]

    def _orders(self, consumed: Collection[Place]) -> dict[Dim, int]:
        """Return the order of each dim by its factors; rows in two orders, cut up or looked across are a
        misuse."""
        orders: dict[Dim, int] = {}
        by_name: dict[str, int] = {}
        for operand, dims in enumerate(self.factoring.operands):
            for dim, names in enumerate(dims):
                if operand in self.factoring.unread or (operand, dim) in consumed:
                    continue
                order = self.order(operand, dim)
                if any(by_name.setdefault(name, order) != order for name in names):
                    raise Misuse
                orders[names] = order
                if order != NATURAL and not self._passes(names):
                    raise Misuse
        return orders

    def _passes(self, names: Dim) -> bool:
        """Tell whether an ordered dim reaches the results as it is, or is summed away."""
        across = self.factoring.whole - self.factoring.pinned
        results = [dim for dims in self.factoring.results for dim in dims if set(dim) & set(names)]
        return not across & set(names) and all(dim == names for dim in results)


@dataclass(frozen=True, slots=True)
class Routing:
    """What was proved: calls that may be made shard by shard, and nodes in an order of the shard's own."""

    calls: Mapping[fx.Node, Call]
    shard_ordered: frozenset[fx.Node]


def find_routing(
    graph: fx.Graph, steps: Mapping[fx.Node, tuple[Call, Factoring]], unseen: Collection[fx.Node] = ()
) -> Routing:
    """Return what may be done shard by shard, given each op node's call and its general factors.

    What the `unseen` ops do with the values that they read is not looked at.
    """
    tracker = _Tracker()
    for node in graph.nodes:
        if node in steps:
            tracker.visit(node, *steps[node])
        elif node.target is operator.getitem:
            tracker.take_item(node)
        elif node.op == "output" or node in unseen:
            tracker.spoil_all(node.all_input_nodes)
    return tracker.routing()


def _keeps_order(step: RowStep) -> bool:
    """Tell whether an index takes rows in natural order from where they stand, by positions that count up."""
    data, *indices = step.given
    natural = all(order == NATURAL for rows in step.given for order in rows.orders.values())
    return natural and data.keys is None and all(rows.points in (SELF, None) for rows in indices)


class _Tracker:
    def __init__(self) -> None:
        self._rows: dict[fx.Node, tuple[KnownRows, ...]] = {}
        self._calls: dict[fx.Node, Call] = {}
        self._origins: dict[fx.Node, frozenset[int]] = {}
        self._plain: dict[fx.Node, dict[int, frozenset[int]]] = {}
        self._spoiled: set[int] = set()
        self._count = 0
        self._sorted: dict[int, fx.Node] = {}
        self._links: list[frozenset[int]] = []

    def routing(self) -> Routing:
        """Return what is not spoiled, origins that met in one op being spoiled together."""
        self._spread()
        sound = [node for node, origins in self._origins.items() if origins and not origins & self._spoiled]
        ordered = [n for n in sound if any(rows.is_local for rows in self._rows.get(n, ()))]
        calls = {n: self._calls[n] for n in sound if n in self._calls and n not in self._plain}
        return Routing(calls | self._plain_indices(), frozenset(ordered))

    def _plain_indices(self) -> dict[fx.Node, Call]:
        """Return the plain indices, each with those of its pointers that are sound."""
        found = {}
        for node, pointing in self._plain.items():
            sound = frozenset(position for position, origins in pointing.items() if not origins & self._spoiled)
            if sound:
                found[node] = replace(self._calls[node], pointers=sound)
        return found

    def _spread(self) -> None:
        before = -1
        while before != len(self._spoiled):
            before = len(self._spoiled)
            for link in self._links:
                if link & self._spoiled:
                    self._spoiled |= link

    def spoil_all(self, nodes: Collection[fx.Node]) -> None:
        """Spoil what the values come from, where they differ by shard."""
        for node in nodes:
            for rows in self._rows.get(node, ()):
                self._spoiled |= rows.origins if rows.is_local else frozenset()

    def take_item(self, node: fx.Node) -> None:
        """Take over what is known of one result of an op."""
        source, index = node.args
        known = self._rows.get(source) if isinstance(source, fx.Node) else None
        if known is not None and isinstance(index, int) and index < len(known):
            self._rows[node] = (known[index],)
            self._origins[node] = known[index].origins

    def visit(self, node: fx.Node, call: Call, factoring: Factoring) -> None:
        """Follow one op, or spoil what its operands come from."""
        given = [self._rows.get(operand.source, (PLAIN,))[0] for operand in call.operands]
        origins = frozenset().union(*(rows.origins for rows in given))
        role = ROLES.get(call.op)
        if not origins and role not in (Role.SORT, Role.COUNT_UP):
            return
        step = RowStep(node, call, factoring, tuple(given))
        try:
            results = self._follow(step, role)
        except Misuse:
            self._spoiled |= origins
            return
        if role is Role.INDEX and _keeps_order(step):
            self._note_plain_index(step, results)
            return
        origins = origins.union(*(rows.origins for rows in results))
        self._links.append(origins)
        self._origins[node] = origins
        known = (replace(rows, origins=origins) if rows.is_known else PLAIN for rows in results)
        self._rows[node] = tuple(known)

    def _note_plain_index(self, step: RowStep, results: Sequence[KnownRows]) -> None:
        """Note rows taken from the positions where they stand (an arange): what they are is not what points at them.

        Each index must be positions of the shard's own, or is none of the pointers; one that is used as a number
        elsewhere does the others no harm. The values taken may come from anywhere, and be used in any way.
        """
        pointers = self._calls[step.node].pointers if step.node in self._calls else ()
        self._plain[step.node] = {position: step.given[position].origins for position in pointers}
        data = step.given[0].origins
        if data:
            self._origins[step.node] = data
        self._rows[step.node] = tuple(replace(rows, origins=data) if data else PLAIN for rows in results)

    def _follow(self, step: RowStep, role: Role | None) -> Sequence[KnownRows]:
        by_role: dict[Role | None, Callable[[RowStep], Sequence[KnownRows]]] = {
            Role.SORT: self._sort,
            Role.COUNT_UP: self._count_up,
            Role.INDEX: self._index,
            Role.PUT: self._put,
            Role.ADD_ROWS: self._add_rows,
            Role.GROUPED: self._grouped,
            Role.MAKE_LIKE: lambda step: [PLAIN],
            Role.COUNT: RowStep.counted,
            Role.DIVIDE: RowStep.divided,
            Role.ADD_UP: RowStep.added_up,
            Role.CARRY: RowStep.carried,
            Role.ADD: RowStep.added,
        }
        draws = step.factoring.random or role is Role.DRAW  # by the places at which rows stand
        if draws and any(rows.is_local for rows in step.given):
            raise Misuse
        return by_role.get(role, RowStep.moved)(step)

    def _new_origin(self) -> int:
        self._count += 1
        return self._count

    def _sort(self, step: RowStep) -> Sequence[KnownRows]:
        rows, shape = step.given[0], step.call.operands[0].shape
        if len(shape) != 1 or rows.counts is not None:
            return step.moved()
        self._calls[step.node] = replace(step.call, routed=True)
        if rows.points is not None:
            return self._sort_positions(step, rows)
        if rows.is_local:
            raise Misuse
        origin = self._new_origin()
        self._sorted[origin] = step.call.operands[0].source
        known = KnownRows(orders={0: origin}, origins=frozenset({origin}))
        positions = replace(known, points=NATURAL, size=shape[0])
        return [replace(known, keys=origin), positions] if len(step.call.results) == 2 else [positions]

    def _sort_positions(self, step: RowStep, rows: KnownRows) -> Sequence[KnownRows]:
        """Sorting the positions that a sort took rows from gives the positions they went to."""
        size = step.call.operands[0].shape[0]
        if rows.points != NATURAL or not rows.orders or rows.size != size:
            raise Misuse
        back = KnownRows(points=rows.orders[0], size=size)
        return [KnownRows(points=SELF, size=size), back] if len(step.call.results) == 2 else [back]

    def _count_up(self, step: RowStep) -> Sequence[KnownRows]:
        arguments, size = step.call.arguments, step.call.results[0][0]
        from_zero = arguments.get("start", 0) == 0 and arguments.get("step", 1) == 1
        if not from_zero or size.number == 1:
            return [PLAIN]
        self._calls[step.node] = replace(step.call, routed=True)
        return [KnownRows(points=SELF, size=size, origins=frozenset({self._new_origin()}))]

    def _index(self, step: RowStep) -> Sequence[KnownRows]:
        source = step.call.operands[0]
        dims = [i for i, index in enumerate(step.call.arguments["indices"]) if index is not None]
        pointers = {}
        for position, dim in enumerate(dims, start=1):
            rows = step.given[position]
            if rows.points is None:
                continue
            if source.shape[dim] == rows.size and step.order(0, dim) == step.target(position):
                pointers[position] = dim
            elif rows.points == SELF:  # counted along a dim of another size: numbers, the same for every shard
                self._spoiled |= rows.origins
                step = step.with_plain(position)
            else:
                raise Misuse
        if not pointers:
            return step.carried()
        call = replace(step.call, pointers=frozenset(pointers))
        self._calls[step.node] = call
        consumed = frozenset((0, dim) for dim in pointers.values())
        found = step.with_call(call).moved(consumed, pointers)
        first, keys = step.given[0], self._keys(step)
        return [replace(rows, points=first.points, size=first.size, keys=keys) for rows in found]

    def _keys(self, step: RowStep) -> int | None:
        """Return the order whose keys these are: what it sorted, taken from where it took them."""
        index = step.given[1]
        order = index.orders.get(0) if index.points == NATURAL and len(step.given) == 2 else None
        return order if order and self._sorted[order] is step.call.operands[0].source else None

    def _put(self, step: RowStep) -> Sequence[KnownRows]:
        if len(step.given) != 3 or step.call.arguments.get("accumulate"):
            raise Misuse
        _, index, values = step.given
        target, shapes = step.call.operands[0].shape, {operand.shape for operand in step.call.operands}
        if len(target) != 1 or len(shapes) != 1 or index.points != NATURAL or index.size != target[0]:
            raise Misuse
        self._calls[step.node] = replace(step.call, pointers=frozenset({1}))
        if values.points == SELF and not values.orders:
            return [KnownRows(points=step.order(1, 0), size=target[0])]
        if values.points is not None or step.order(2, 0) != step.order(1, 0):
            raise Misuse
        return [PLAIN]

    def _add_rows(self, step: RowStep) -> Sequence[KnownRows]:
        target, index, added = step.given
        shape = step.call.operands[0].shape
        dim = step.call.dim()
        elsewhere = [order for place, order in added.orders.items() if place != dim]
        misfit = index.points != NATURAL or index.size != shape[dim] or step.order(2, dim) != step.order(1, 0)
        if misfit or target.is_local or added.points is not None or elsewhere:
            raise Misuse
        self._calls[step.node] = replace(step.call, pointers=frozenset({1}))
        return [PLAIN]

    def _grouped(self, step: RowStep) -> Sequence[KnownRows]:
        order = step.order(0, 0)
        if order == NATURAL or step.given[-1].counts != order or step.given[1].is_local:
            raise Misuse
        self._calls[step.node] = replace(step.call, routed=True)
        return [KnownRows(orders={0: order})]
