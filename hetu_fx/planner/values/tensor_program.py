"""What HAP plans for: a program of tensors and ops, written down or taken from a captured graph.

The dims of a tensor are those that can be cut on their own: a dim of the model's tensor, or a factor of one
(the heads of a projection that are fused with other things). An op names what its operands' and results' dims
stand for, as a rule of `hetu_fx.deduction` does: a factor that no result has is summed away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hetu_fx.cluster.devices import FLOPS_PER_BYTE
from hetu_fx.errors import PlanError

Kind = Literal["input", "parameter", "value"]
Factors = tuple[str, ...]
NOTHING: frozenset[str] = frozenset()
NO_POSITIONS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the program.

    Attributes:
        name: unique in the program; a parameter's is its name in the model.
        shape: sizes of the dims that can be cut.
        kind: inputs are at hand on every device, parameters wherever the search puts them.
        element_bytes: bytes of an element.
        has_gradient: whether the backward makes a gradient of it.
        is_kept: whether the forward keeps it for the backward.
        movable: whether devices may exchange it (HAP's released rules forbid it for some ops' results).
        origin: for each dim, the dim of the model's tensor that it is (a factor of); left out: its own number.
        row_dim: the dim that counts rows of the batch, if there is one.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = "value"
    element_bytes: float = 4.0
    has_gradient: bool = True
    is_kept: bool = True
    movable: bool = True
    origin: tuple[int, ...] = ()
    row_dim: int | None = None

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape) or self.element_bytes <= 0:
            raise PlanError(f"tensor {self.name!r} has shape {self.shape}, {self.element_bytes} bytes an element")
        if self.kind == "input":  # nothing asks for its gradient
            object.__setattr__(self, "has_gradient", False)
        if not self.origin:
            object.__setattr__(self, "origin", tuple(range(len(self.shape))))
        if len(self.origin) != len(self.shape):
            raise PlanError(f"tensor {self.name!r}: {len(self.origin)} origins for {len(self.shape)} dims")

    @property
    def bytes(self) -> float:
        """Return the bytes of the whole tensor."""
        return math.prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Op:
    """A step of the program.

    Attributes:
        name: unique in the program.
        reads, makes: names of the tensors it reads and makes.
        operands, results: for each of them, the factor that each dim stands for.
        flops: work of the forward.
        backward_flops: work of the gradient of each operand; left out: `flops` for each that has a gradient.
        whole: factors that may not be cut.
        linear: sets of operand positions in which the op is jointly linear, the others held fixed.
        unread: operands whose values and layout do not matter.
        segment: which of the ratio vectors its shards follow.
        copyable: whether all devices may do all of it (HAP's released rules forbid it for embeddings).
        moves: whether it is no product: its flops are those in the time in which its bytes are moved, at
            `FLOPS_PER_BYTE`, until `TensorProgram.at` says how many these are.
        sends_factors: what it may be cut on where gradients of its parameters are made from gathered factors; None:
            anything.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    flops: float = 0.0
    backward_flops: tuple[float, ...] = ()
    whole: frozenset[str] = NOTHING
    linear: tuple[frozenset[int], ...] = ()
    unread: frozenset[int] = NO_POSITIONS
    segment: int = 0
    copyable: bool = True
    moves: bool = False
    sends_factors: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if len(self.reads) != len(self.operands) or len(self.makes) != len(self.results):
            raise PlanError(
                f"op {self.name!r} reads {self.reads} with factors {self.operands} and makes {self.makes} with "
                f"factors {self.results}\nhint: give one tuple of factors for each tensor"
            )
        if self.backward_flops and len(self.backward_flops) != len(self.reads):
            raise PlanError(f"op {self.name!r}: {len(self.backward_flops)} backward_flops for {self.reads}")
        if self.flops < 0 or self.segment < 0:
            raise PlanError(f"op {self.name!r}: flops {self.flops}, segment {self.segment}\nhint: give 0 or more")

    @property
    def factors(self) -> tuple[str, ...]:
        """Return the factors of all tensors whose values are read or made, in order."""
        read = (names for i, names in enumerate(self.operands) if i not in self.unread)
        return tuple(dict.fromkeys(name for names in (*read, *self.results) for name in names))


@dataclass(frozen=True)
class TensorProgram:
    """A program: tensors, ops in an order in which they can run, what is wanted of it.

    Attributes:
        tensors: all tensors.
        ops: all ops.
        outputs: tensors that are wanted at the end, such as the loss; any layout of them will do.
        blocks: (start, stop) of the ops of each repeated block, in order; equal ones are solved once.
        by_name: the tensors by name.
        first_use, last_use: the index of the first op that reads or makes each tensor, and of the last that reads it;
            outputs are read after all of them.
        num_segments: how many ratio vectors the program has.
    """

    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    blocks: tuple[tuple[int, int], ...] = ()
    by_name: Mapping[str, Tensor] = field(init=False, repr=False, compare=False)
    first_use: Mapping[str, int] = field(init=False, repr=False, compare=False)
    last_use: Mapping[str, int] = field(init=False, repr=False, compare=False)
    num_segments: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("tensors", "ops", "outputs", "blocks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        used = [(name, index) for index, op in enumerate(self.ops) for name in (*op.reads, *op.makes)]
        read = {name: index for index, op in enumerate(self.ops) for name in op.reads}
        object.__setattr__(self, "by_name", {tensor.name: tensor for tensor in self.tensors})
        object.__setattr__(self, "first_use", dict(reversed(used)))
        object.__setattr__(self, "last_use", read | dict.fromkeys(self.outputs, len(self.ops)))
        object.__setattr__(self, "num_segments", 1 + max((op.segment for op in self.ops), default=0))
        _check_names("tensor", [tensor.name for tensor in self.tensors])
        _check_names("op", [op.name for op in self.ops])
        _check_order(self)
        for op in self.ops:
            _check_dims(self, op)
        _check_blocks(self)

    def at(self, flops_per_byte: float) -> TensorProgram:
        """Return the program for devices that do so many FLOPs in the time in which they move a byte."""
        ratio = flops_per_byte / FLOPS_PER_BYTE
        if ratio == 1.0:
            return self
        return replace(self, ops=tuple(_scaled(op, ratio) if op.moves else op for op in self.ops))

    def in_one_segment(self) -> TensorProgram:
        """Return the same program with one ratio vector for all of it."""
        return replace(self, ops=tuple(replace(op, segment=0) for op in self.ops))

    def size(self, op: Op, factor: str) -> int:
        """Return the size of a factor of an op."""
        pairs = zip((*op.reads, *op.makes), (*op.operands, *op.results), strict=True)
        return next(self.by_name[name].shape[dims.index(factor)] for name, dims in pairs if factor in dims)

    def backward_flops(self, op: Op) -> tuple[float, ...]:
        """Return the work of the gradient of each operand of an op."""
        given = op.backward_flops or (op.flops,) * len(op.reads)
        pairs = zip(op.reads, given, strict=True)
        return tuple(flops if self.by_name[name].has_gradient else 0.0 for name, flops in pairs)

    def all_flops(self, op: Op) -> float:
        """Return the work of an op, forward and backward."""
        return op.flops + math.fsum(self.backward_flops(op))


def _scaled(op: Op, ratio: float) -> Op:
    return replace(op, flops=op.flops * ratio, backward_flops=tuple(flops * ratio for flops in op.backward_flops))


def _check_names(what: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise PlanError(f"{what}s {twice} are twice in a program\nhint: give each a name of its own")


def _check_order(problem: TensorProgram) -> None:
    known = {tensor.name for tensor in problem.tensors if tensor.kind != "value"}
    for op in problem.ops:
        missing = [name for name in op.reads if name not in known]
        strange = [name for name in op.makes if name not in problem.by_name or name in known]
        if missing or strange:
            raise PlanError(
                f"op {op.name!r} reads {missing}, which nothing before it makes, or makes {strange}, which are no "
                f"tensors of the program or made before\nhint: put ops in order, one for each value"
            )
        known.update(op.makes)
    if missing := [name for name in problem.outputs if name not in known]:
        raise PlanError(f"outputs {missing} are made by no op")


def _check_dims(problem: TensorProgram, op: Op) -> None:
    sizes: dict[str, int] = {}
    for name, factors in zip((*op.reads, *op.makes), (*op.operands, *op.results), strict=True):
        shape = problem.by_name[name].shape
        wrong = len(shape) != len(factors) or any(
            sizes.setdefault(f, size) != size for f, size in zip(factors, shape, strict=True)
        )
        if wrong:
            raise PlanError(
                f"op {op.name!r}: factors {factors} do not fit the shape {shape} of {name!r}, next to sizes {sizes}"
            )


def _check_blocks(problem: TensorProgram) -> None:
    stops = [0, *(stop for _, stop in problem.blocks)]
    pairs = zip(problem.blocks, stops, strict=False)
    if any(start < before or stop <= start for (start, stop), before in pairs) or stops[-1] > len(problem.ops):
        raise PlanError(
            f"blocks {problem.blocks} of {len(problem.ops)} ops\nhint: give ranges in order that do not overlap"
        )
