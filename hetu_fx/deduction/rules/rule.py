"""What a rule says about one call: the factors of the dims of its operands and results.

A factor name stands for one index of the op's definition. A factor that no result has is summed away, one
that stands in `whole` cannot be cut (the op looks across it), every other one passes through: each shard of
it is computed from the same shard of the operands that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hetu_fx.deduction.rules.call import Call, Path
from hetu_fx.deduction.rules.forms import NO_TRAITS, OpTraits
from hetu_fx.deduction.rules.size import Size
from hetu_fx.errors import RuleError

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LiteralSize:
    """An argument (or an element of one) that is the product of the sizes of some factors of the result."""

    path: Path
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Factoring:
    """The factors of one call.

    Attributes:
        operands: per operand, per dim, the names of its factors, outermost first; () for a dim of size 1.
        results: the same per result.
        sizes: sizes of factors that are not alone in any dim.
        whole: factors that must not be cut in this op.
        sharded: factors that the op looks across, and that may be cut all the same: on a part of them a form
            of the op runs. Each is a whole dim wherever it stands. Where a rule has no such form, they are whole.
        linear: sets of operand positions the op is jointly linear in, the others held fixed.
        additive: operands that are added after the summation over the factors they lack (a bias): if such a
            factor is cut, only one shard may add them.
        averaged: summed factors that the op divides by the count of: a shard's result weighs as its count.
        counted: operands that hold counts of the rows of the shard, so they are partial where rows are cut.
        unread: operands of which only dtype and device are read: neither their factors nor their values
            matter.
        literals: arguments that hold literal sizes.
        pinned: factors that must not be cut anywhere in the graph.
        placed: factors along which the op goes by position. On a part of them it must be told where the part lies,
            as a form of the op is; elsewhere they stay whole.
        travelling: operands of which devices that have parts of the other factors may have parts of this one too,
            which go round from device to device in a form of the op: the factor by operand.
        random: whether the op draws random numbers.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, Size] = field(default_factory=dict)
    whole: frozenset[str] = NOTHING
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    averaged: frozenset[str] = NOTHING
    counted: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    literals: tuple[LiteralSize, ...] = ()
    pinned: frozenset[str] = NOTHING
    random: bool = False
    sharded: frozenset[str] = NOTHING
    placed: frozenset[str] = NOTHING
    travelling: Mapping[int, str] = field(default_factory=dict)

    @property
    def reduced(self) -> frozenset[str]:
        """Return the factors that are summed away."""
        read = (dims for i, dims in enumerate(self.operands) if i not in self.unread)
        return factor_names(read) - factor_names(self.results) - self.whole


Builder = Callable[[Call], Factoring]


@dataclass(frozen=True, slots=True)
class Rule:
    """What is known of one op: "namespace.op.overload" (`*` allowed), how a call of it factors, and its traits."""

    op: str
    build: Builder
    text: str
    traits: OpTraits = NO_TRAITS

    def __post_init__(self) -> None:
        if self.op.count(".") != 2:
            raise RuleError(f"op {self.op!r} is not of the form 'namespace.name.overload', e.g. 'aten.mm.default'")

    def factor(self, call: Call) -> Factoring:
        """Return the factors of a call; RuleError if the rule does not fit the call's operands."""
        factoring = _with_forms(self.build(call), self.traits)
        _check_fits(self, call, factoring)
        return factoring


def factor_names(tensors: Iterable[Dims]) -> frozenset[str]:
    """Return all factor names of some operands or results."""
    return frozenset(name for dims in tensors for dim in dims for name in dim)


def _with_forms(factoring: Factoring, traits: OpTraits) -> Factoring:
    """Keep whole what may only be cut in a form of the op that it has not."""
    stays = factoring.sharded if traits.sharded is None else NOTHING
    stays |= factoring.placed if traits.placed is None else NOTHING
    return replace(
        factoring,
        whole=factoring.whole | stays,
        sharded=factoring.sharded - stays,
        placed=factoring.placed - stays,
        travelling=factoring.travelling if traits.ring else {},
    )


def _check_fits(rule: Rule, call: Call, factoring: Factoring) -> None:
    given = [len(operand.shape) for operand in call.operands], [len(shape) for shape in call.results]
    ruled = [len(dims) for dims in factoring.operands], [len(dims) for dims in factoring.results]
    if given != ruled:
        raise RuleError(
            f"the rule of {rule.op} has operands and results of ranks {ruled}, the call has {given} "
            f"({call.where}); rule: {rule.text}"
        )
