"""What a tensor parallel group would cut in a graph, for the costs of a program.

Which factor classes are cut is decided where plans are put on graphs; here it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from hetu_fx.deduction.factors.dual_roles import elsewhere
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap


class Cut(Protocol):
    """What the costs need to know of a cut."""

    @property
    def units(self) -> int:
        """Return how many parts can be made at most; 1 if nothing is cut."""
        ...

    def shares_work(self, node: fx.Node) -> bool:
        """Tell whether the devices of a group do a part of this op each."""
        ...

    def splits(self, node: fx.Node) -> bool:
        """Tell whether the devices of a group hold a part of this value each."""
        ...

    def sums(self, node: fx.Node) -> bool:
        """Tell whether summands of this value are summed over the group."""
        ...

    def returns(self, node: fx.Node) -> bool:
        """Tell whether summands of this value's cotangent are summed over the group."""
        ...

    def shares_sequence(self, node: fx.Node) -> bool:
        """Tell whether a group that shares the sequence does a part of this op each, and holds a part of its result."""
        ...

    def contracted(self, node: fx.Node) -> int:
        """Return the size over which the op sums products of two operands; 0 if it is not known to do so."""
        ...

    def gathered(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the operands that the op reads whole where a group shares the sequence: keys and values."""
        ...


@dataclass(frozen=True, slots=True)
class NoCut:
    """Nothing is cut: every device of a group would do everything."""

    units: int = 1

    def shares_work(self, node: fx.Node) -> bool:
        """Tell that no work is shared."""
        return False

    def splits(self, node: fx.Node) -> bool:
        """Tell that no value is split."""
        return False

    def sums(self, node: fx.Node) -> bool:
        """Tell that no sum is needed."""
        return False

    def returns(self, node: fx.Node) -> bool:
        """Tell that no sum of cotangents is needed."""
        return False

    def shares_sequence(self, node: fx.Node) -> bool:
        """Tell that no sequence is shared."""
        return False

    def contracted(self, node: fx.Node) -> int:
        """Return that nothing is known."""
        return 0

    def gathered(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return that nothing is known."""
        return ()


@dataclass(frozen=True, slots=True)
class FactorCut:
    """Factor classes are cut.

    Attributes:
        factors: what the ops do to classes.
        classes: those that are cut.
        summed: the values that are summed over the group.
        returned: the values whose cotangents are.
        in_sequence: the ops that can run on a part of a sequence besides.
    """

    factors: FactorMap
    classes: frozenset[FactorClass]
    summed: frozenset[fx.Node] = frozenset()
    returned: frozenset[fx.Node] = frozenset()
    in_sequence: frozenset[fx.Node] = frozenset()

    @property
    def units(self) -> int:
        """Return the size of the smallest class: no device of a group may be left without a part."""
        return min((factor.size or 1 for factor in self.classes), default=1)

    def shares_work(self, node: fx.Node) -> bool:
        """Tell whether a cut class stands in an operand or a result of the op, and may be cut there."""
        if not self.factors.is_op(node):
            return False
        op = self.factors.op(node)
        tensors = (*op.results, *(operand.dims for operand in op.operands))
        present = {factor for dims in tensors for dim in dims for factor in dim}
        return not self.classes.isdisjoint(present - op.whole)

    def splits(self, node: fx.Node) -> bool:
        """Tell whether a cut class stands in a dim of the value."""
        return any(not self.classes.isdisjoint(dim) for dim in self.factors.dims(node))

    def sums(self, node: fx.Node) -> bool:
        """Tell whether the value is summed over the group."""
        return node in self.summed

    def returns(self, node: fx.Node) -> bool:
        """Tell whether the value's cotangent is summed over the group."""
        return node in self.returned

    def shares_sequence(self, node: fx.Node) -> bool:
        """Tell whether the op can run on a part of a sequence."""
        return node in self.in_sequence

    def contracted(self, node: fx.Node) -> int:
        """Return the size of the classes that are summed away and stand in two operands at least."""
        if not self.factors.is_op(node):
            return 0
        op = self.factors.op(node)
        operands = [{factor for dim in operand.dims for factor in dim} for operand in op.operands]
        shared = [c for c in op.reduced - op.sharded if c.size and sum(c in operand for operand in operands) > 1]
        return math.prod(factor.size or 1 for factor in shared) if shared else 0

    def gathered(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the operands that have a class of which the op cuts another dim."""
        apart = self.factors.op(node).apart.items() if self.factors.is_op(node) else ()
        pairs = [(o, factor) for factor, seen in apart if not factor.is_batch for o in seen.operands]
        found = (o.node for o, factor in pairs if elsewhere(factor) in o.classes and factor not in o.classes)
        return tuple(dict.fromkeys(found))
