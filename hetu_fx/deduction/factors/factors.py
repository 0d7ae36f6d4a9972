"""Factor classes of a graph and what each op does to them: the values that `analyse` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from hetu_fx.deduction.rules.call import Path, entries
from hetu_fx.deduction.rules.forms import NO_TRAITS, OpTraits
from hetu_fx.errors import DeductionError
from hetu_fx.graph import meta
from hetu_fx.graph.graph import Leaf, LeafKind


@dataclass(frozen=True, slots=True)
class FactorClass:
    """A parallel dimension of the model: a factor that occurs in many dims, which are only cut together.

    Attributes:
        id: number by first occurrence in the graph.
        size: its size, or None if it is symbolic.
        is_batch: whether it is the rows of the batch.
        text: its size as text ("s12"), for messages.
        hint: its size in the example batch.
    """

    id: int
    size: int | None
    is_batch: bool
    text: str = field(default="", compare=False)
    hint: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"#{self.id}({'batch ' if self.is_batch else ''}{self.text})"


ClassDim = tuple[FactorClass, ...]
ClassDims = tuple[ClassDim, ...]


def flat(dims: ClassDims) -> ClassDim:
    """Return the classes of all dims, one after another."""
    return tuple(cls for dim in dims for cls in dim)


@dataclass(frozen=True, slots=True)
class OperandFactors:
    """A tensor operand of an op: the node, where it stands in the call, and the classes of its dims."""

    node: fx.Node
    path: Path
    dims: ClassDims

    @property
    def classes(self) -> frozenset[FactorClass]:
        """Return the classes of all dims."""
        return frozenset(flat(self.dims))


@dataclass(frozen=True, slots=True)
class SizeArg:
    """An argument that holds a literal size: to be replaced by the product of the local sizes of the classes.

    Attributes:
        path: where it stands in the call: (1,) or ("size", 2). It may also hold -1 or a symbolic size, which
            stay.
        classes: the classes whose product it is.
    """

    path: Path
    classes: ClassDim


@dataclass(frozen=True, slots=True)
class OpFactors:
    """What an op does to factor classes.

    Attributes:
        operands: tensor operands, lists flattened, in the order of the op's arguments.
        results: classes of the dims of each tensor result.
        reduced: classes that are summed away: where one is cut, results are partial.
        whole: classes that must be whole in this op.
        linear: sets of operand positions in which the op is jointly linear, the others duplicated: partial
            values of all operands of a set give partial results.
        additive: operands (a bias) that are added after the summation: where a reduced class that they lack
            is cut, only one shard may add them, the others zero.
        averaged: those of `reduced` over which the op takes a mean: a shard's result weighs as its count.
        counted: operands that hold counts of the shard's rows: partial where the rows are cut, and meant to
            be.
        unread: operands of which only dtype and device are read.
        size_args: arguments that hold literal sizes.
        random: whether the op draws random numbers.
        known: False if there is no rule: everything is whole.
        sharded: classes that the op looks across, and has a form of its own for where they are cut.
        placed: classes along which the op goes by position.
        travelling: operands of which devices may have parts, which go round: the class of these.
        traits: what is known of the op besides.
        apart: classes of `whole` that may be cut where they come first: the op as it then is (see `apart`).
    """

    operands: tuple[OperandFactors, ...]
    results: tuple[ClassDims, ...]
    reduced: frozenset[FactorClass] = frozenset()
    whole: frozenset[FactorClass] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    averaged: frozenset[FactorClass] = frozenset()
    counted: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    size_args: tuple[SizeArg, ...] = ()
    random: bool = False
    known: bool = True
    sharded: frozenset[FactorClass] = frozenset()
    placed: frozenset[FactorClass] = frozenset()
    travelling: Mapping[int, FactorClass] = field(default_factory=dict)
    traits: OpTraits = NO_TRAITS
    apart: Mapping[FactorClass, OpFactors] = field(default_factory=dict)

    @property
    def classes(self) -> frozenset[FactorClass]:
        """Return the classes that occur in any result, or in any operand whose values are read."""
        return self.made.union(*(operand.classes for operand in self.read))

    @property
    def made(self) -> frozenset[FactorClass]:
        """Return the classes that occur in any result."""
        return frozenset(cls for dims in self.results for cls in flat(dims))

    @property
    def read(self) -> tuple[OperandFactors, ...]:
        """Return the operands whose values are read."""
        return tuple(operand for position, operand in enumerate(self.operands) if position not in self.unread)

    @property
    def rows_meet(self) -> bool:
        """Tell whether the op must have all rows of the batch at once, to look across them or to count them up.

        So does one whose mean over rows is no sum over a count: shares of rows would weigh alike.
        """
        read = frozenset(cls for operand in self.read for cls in operand.classes if cls.is_batch)
        rows = read or frozenset(cls for cls in self.made if cls.is_batch)
        return bool(rows & (self.whole | self.sharded)) or any(cls.is_batch for cls in self.averaged)

    @property
    def contracted_classes(self) -> tuple[FactorClass, ...]:
        """Return the classes over which the op sums products of two operands."""
        candidates = self.reduced - self.sharded
        return tuple(c for c in candidates if sum(c in operand.classes for operand in self.operands) > 1)

    def numbers_of(self, node: fx.Node) -> tuple[tuple[Path, fx.Node], ...]:
        """Return the numbers that the op reads in a call of it, other than as sizes of what it makes, by their places.

        A number is any node whose value is no tensor.
        """
        sizes = {arg.path for arg in self.size_args}
        given = [*entries(node.args), *entries(node.kwargs)]
        return tuple((path, item) for path, item in given if path not in sizes and not meta.has_tensor(item))

    def with_cut(self, factor: FactorClass) -> OpFactors:
        """Return the op as it is for one who cuts `factor` in it, or wants to."""
        return self.apart.get(factor, self)


@dataclass(frozen=True, eq=False)
class FactorMap:
    """The factor classes of a graph.

    Attributes:
        classes: all classes, by id.
        repeated: classes that occur twice in one tensor: they cannot be split.
        pinned: classes that an op needs whole wherever they occur: they cannot be split.
        shard_ordered: nodes whose rows stand in an order of the shard's own (see `rules.routing`): cut rows
            of such a value must not be moved between shards.
    """

    classes: tuple[FactorClass, ...]
    repeated: frozenset[FactorClass]
    pinned: frozenset[FactorClass]
    shard_ordered: frozenset[fx.Node]
    leaves: tuple[Leaf, ...]
    _dims: Mapping[fx.Node, tuple[ClassDims, ...]]
    _ops: Mapping[fx.Node, OpFactors]

    def dims(self, node: fx.Node) -> ClassDims:
        """Return the classes of each dim of a tensor-valued node, outermost first; () for a dim of size 1.

        Raises:
            DeductionError: the node's value is not one tensor (ask for its getitem nodes).
        """
        found = self._dims.get(node, ())
        if len(found) != 1:
            raise DeductionError(f"node '{node}' has {len(found)} tensor values\nhint: use one of its getitem nodes")
        return found[0]

    def sizes(self, node: fx.Node) -> tuple[int | None, ...]:
        """Return the size of each dim by its classes, None where one is symbolic."""
        return tuple(map(_product, self.dims(node)))

    @property
    def ops(self) -> tuple[OpFactors, ...]:
        """Return what every op does to factors."""
        return tuple(self._ops.values())

    def seen(
        self,
        classes: tuple[FactorClass, ...],
        dims: Callable[[ClassDims], ClassDims],
        op: Callable[[OpFactors], OpFactors],
    ) -> FactorMap:
        """Return the map with other classes, dims and ops made of its own."""
        values = {node: tuple(map(dims, found)) for node, found in self._dims.items()}
        ops = {node: op(found) for node, found in self._ops.items()}
        return FactorMap(classes, self.repeated, self.pinned, self.shard_ordered, self.leaves, values, ops)

    def row_dim(self, node: fx.Node) -> int | None:
        """Return the dim of a value that counts rows of the batch, if it has one."""
        return next((i for i, dim in enumerate(self.dims(node)) if any(cls.is_batch for cls in dim)), None)

    def op(self, node: fx.Node) -> OpFactors:
        """Return what an op node does to factors; DeductionError for a node that handles no tensor."""
        if node not in self._ops:
            raise DeductionError(f"node '{node}' is no op on tensors")
        return self._ops[node]

    def is_op(self, node: fx.Node) -> bool:
        """Tell whether the node is an op that reads or makes tensors."""
        return node in self._ops

    def splittable(self, cls: FactorClass) -> bool:
        """Tell whether a class may be split anywhere."""
        return cls not in self.repeated and cls not in self.pinned

    def occurrences(self, cls: FactorClass) -> tuple[tuple[str, int], ...]:
        """Return (parameter FQN, dim) of all dims of parameters that the class occurs in."""
        return tuple((leaf.name, dim) for leaf, dim in self.leaf_dims(cls) if leaf.kind is LeafKind.PARAMETER)

    def leaf_dims(self, cls: FactorClass) -> tuple[tuple[Leaf, int], ...]:
        """Return (leaf, dim) of all dims of leaves that the class occurs in."""
        return self._leaf_dims.get(cls, ())

    def sub_factor(self, node: fx.Node, dim: int, cls: FactorClass) -> tuple[int | None, int | None]:
        """Return (outer, inner), the sizes before and after a class inside a dim; None where it is symbolic.

        Raises:
            DeductionError: the class does not occur in that dim, or not just once.
        """
        factors = self.dims(node)[dim]
        if factors.count(cls) != 1:
            raise DeductionError(f"class {cls} does not occur once in dim {dim} of '{node}': {_text(factors)}")
        at = factors.index(cls)
        return _product(factors[:at]), _product(factors[at + 1 :])

    @cached_property
    def _leaf_dims(self) -> dict[FactorClass, tuple[tuple[Leaf, int], ...]]:
        found: dict[FactorClass, list[tuple[Leaf, int]]] = {}
        for leaf in self.leaves:
            for dim, factors in enumerate(self._dims.get(leaf.node, ((),))[0]):
                for cls in dict.fromkeys(factors):
                    found.setdefault(cls, []).append((leaf, dim))
        return {cls: tuple(pairs) for cls, pairs in found.items()}


def _product(factors: ClassDim) -> int | None:
    result = 1
    for cls in factors:
        if cls.size is None:
            return None
        result *= cls.size
    return result


def _text(factors: ClassDim) -> str:
    return " x ".join(map(str, factors)) or "1"
