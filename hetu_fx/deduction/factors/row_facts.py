"""What is known of the rows of a tensor, and how an op passes it on (see `row_order`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.registry import find_rule
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
