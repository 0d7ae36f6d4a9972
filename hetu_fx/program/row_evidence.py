"""What a captured program shows of its rows, where they were taken to be dim 0 and meet in the model.

Rows of a batch are independent of each other, or meet in all of them alike. A time-first input (torch's own order for
recurrent and attention modules) is independent along another dim, which labels may have as their only one. Nothing
proves what the user means, so what is found is used with a warning where all that is seen agrees, and is a doubt, with
which ranks' rows are not put together, where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hetu_fx.base.dtypes import is_real
from hetu_fx.deduction.factors.factors import FactorClass, FactorMap
from hetu_fx.graph import meta
from hetu_fx.graph.calls import operand, viewed_argument
from hetu_fx.graph.functional import SAME_VALUE
from hetu_fx.graph.row_dims import RowDims
from hetu_fx.program.filling_safety import Buffers, random_outputs
from hetu_fx.program.program import Program

_TRIALS = 2
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Evidence:
    """What was found: the dims that are used as rows (None: as they were taken), or why nobody can tell."""

    used: RowDims | None = None
    doubt: str = ""


NOTHING = Evidence()
Capture = Callable[[RowDims], Program]


def evidence_of_rows(program: Program, assumed: RowDims, capture: Capture, buffers: Buffers) -> Evidence:
    """Return what a program shows, whose rows were taken to be the dims `assumed`.

    Args:
        program: in training, with a loss.
        assumed: by the inputs' names.
        capture: gives the program of the same model with other dims as rows.
        buffers: gives those of the model.
    """
    if starts := [name for name in _starts(program) if name in assumed]:
        return Evidence(doubt=_doubt_of_starts(starts))
    loss = program.graph.loss
    if loss is None or not assumed:
        return NOTHING
    rows, tail = _class_of_rows(program, assumed), _linear_in(program.factors, loss)
    if not _meet(program.factors, loss, rows, tail) or not program.mixes_rows:
        return NOTHING
    found = [dims for dims in _others(program, assumed) if not capture(dims).mixes_rows]
    if not found:
        return NOTHING
    of_all = any(program.factors.op(node).reduced & rows for node in tail if program.factors.is_op(node))
    has_labels = any(dims.get(name) == 0 and name not in assumed for dims in found for name in dims)
    ordered = has_labels or _goes_by_order(program, rows, buffers)
    if not of_all and not ordered:
        return NOTHING
    if len(found) == 1 and not of_all:
        return Evidence(used=found[0])
    return Evidence(doubt=_doubt(assumed, found))


def row_dims_warning(used: RowDims) -> str:
    """Return what is to be said of dims that are used without being asked for."""
    return (
        f"entries along dim 0 of the inputs meet in the model, and its loss is one over another dim: the rows of the "
        f"batch are taken to be dims {dict(used)}\nhint: say so by row_dims={dict(used)}, or which they are"
    )


def _doubt(assumed: RowDims, found: list[dict[str, int]]) -> str:
    others = " or ".join(map(str, found))
    return (
        f"rows of the inputs were taken to be dims {dict(assumed)}, along which they meet in the model, but they are "
        f"independent of each other along dims {others}\nhint: say which dims count the rows: row_dims={found[0]} "
        f"if the batch is that dim, as in time-first inputs, or row_dims={dict(assumed)}"
    )


def _doubt_of_starts(names: list[str]) -> str:
    told = " and ".join(map(repr, names))
    return (
        f"the values of input {told} are positions in the rows of another input, which begin at 0 on every rank: rows "
        f"of ranks cannot be put together\nhint: pass the batch of all ranks to each, by data='global', or entries "
        f"of one length as a tensor of two dims, without positions"
    )


def _starts(program: Program) -> Iterator[str]:
    """Yield the inputs whose values are read as positions in the rows of another input."""
    inputs = {leaf.node: leaf.name for leaf in program.inputs}
    for node in filter(program.factors.is_op, program.graph.graph.nodes):
        op = program.factors.op(node)
        read = (_same_values(op.operands[place].node) for place in op.traits.starts if place < len(op.operands))
        yield from (inputs[found] for found in read if found in inputs)


def _same_values(node: fx.Node) -> fx.Node:
    """Return what a value is a part of, or the same as in another dtype, or gathered from all replicas."""
    same = {*SAME_VALUE, torch.ops.hetu.place_rows.default}
    while node.op == "call_function" and (node.target in same or viewed_argument(node) is not None):
        node = operand(node)
    return node


def _others(program: Program, assumed: RowDims) -> Iterator[dict[str, int]]:
    """Yield the dims that inputs have in common, of an open size and not those of the rows.

    All inputs that were taken to have rows have such a dim; what no op reads shows nothing.
    """
    read = [leaf for leaf in program.inputs if any(map(program.factors.is_op, leaf.node.users))]
    dims = {leaf.name: program.factors.dims(leaf.node) for leaf in read}
    rows = _class_of_rows(program, assumed)
    open_classes = dict.fromkeys(
        classes[0]
        for name in filter(dims.__contains__, assumed)
        for classes in dims[name]
        if len(classes) == 1 and classes[0].size is None and classes[0] not in rows
    )
    for cls in open_classes:
        common = {name: found.index((cls,)) for name, found in dims.items() if found.count((cls,)) == 1}
        if common.keys() >= assumed.keys() & dims.keys():
            yield common


def _class_of_rows(program: Program, assumed: RowDims) -> frozenset[FactorClass]:
    leaves = {leaf.name: leaf.node for leaf in program.inputs}
    return frozenset(cls for name, dim in assumed.items() for cls in program.factors.dims(leaves[name])[dim])


def _linear_in(factors: FactorMap, loss: fx.Node) -> set[fx.Node]:
    """Return the values that the loss is linear in, itself among them."""
    todo, found = [loss], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if factors.is_op(node):
            op = factors.op(node)
            linear = frozenset().union(*op.linear)
            todo += [operand.node for place, operand in enumerate(op.operands) if place in linear]
        elif node.op == "call_function":
            todo += node.all_input_nodes
    return found


def _meet(factors: FactorMap, loss: fx.Node, rows: frozenset[FactorClass], tail: set[fx.Node]) -> bool:
    """Tell whether an op that makes the loss, but for its last sums, looks across rows: cheaper than a deduction."""
    todo, seen = [loss], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += node.all_input_nodes
        if node not in tail and factors.is_op(node) and rows & (factors.op(node).whole | factors.op(node).reduced):
            return True
    return False


def _goes_by_order(program: Program, rows: frozenset[FactorClass], buffers: Buffers) -> bool:
    """Tell whether the loss of random inputs changes with the order of what were taken to be rows; tried on a few."""
    dims = {
        leaf.name: [dim for dim, classes in enumerate(program.factors.dims(leaf.node)) if rows & set(classes)]
        for leaf in program.inputs
    }
    try:
        return any(_changes(program, dims, buffers, number) for number in range(_TRIALS))
    except Exception:  # whatever ops raise on sizes and values that they were not meant for: nothing is known
        return False


def _changes(program: Program, dims: Mapping[str, list[int]], buffers: Buffers, number: int) -> bool:
    random = torch.Generator().manual_seed(number)
    given = {leaf.name: _sample(leaf.node, random) for leaf in program.inputs}
    turned = {
        name: tensor.roll([1] * len(dims[name]), dims[name]) if dims[name] else tensor for name, tensor in given.items()
    }
    place = [leaf.name for leaf in program.graph.outputs].index(program.loss_name)
    one, other = (random_outputs(program, buffers, tensors, number)[place] for tensors in (given, turned))
    return bool((one - other).abs() > _TOLERANCE * one.abs())


def _sample(node: fx.Node, random: torch.Generator) -> Tensor:
    shape, dtype = meta.hints(node), meta.dtype(node)
    if is_real(dtype):
        return torch.randn(shape, generator=random, dtype=torch.float64)
    return torch.randint(0, 2, shape, generator=random).to(dtype)
