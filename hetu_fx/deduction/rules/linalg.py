"""Linear algebra: of matrices and vectors the last dims stay whole, what stands before them is batch and passes.

Solutions are linear in right-hand sides, products along a dim in each factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetu_fx.deduction.rules.build import EACH, broadcast, broadcast_shape, fresh_dims, names, rules_for_ops
from hetu_fx.deduction.rules.call import Call, Shape
from hetu_fx.deduction.rules.reduction import reduce_dims
from hetu_fx.deduction.rules.rule import Dims, Factoring, Rule, factor_names
from hetu_fx.deduction.rules.size import integer

LinearSets = tuple[frozenset[int], ...]


def _leading_batch_dims(call: Call, given: Sequence[int], made: Sequence[int], linear: LinearSets = ()) -> Factoring:
    """Work on the last dims, so many of each operand and result, which stay whole; dims before them are batch."""
    shapes = [operand.shape for operand in call.operands]
    counts = [*given, *[0] * (len(shapes) - len(given))]
    leads = [_lead(shape, count) for shape, count in zip(shapes, counts, strict=True)]
    batch = fresh_dims(broadcast_shape(leads), "b")
    operands = tuple(_of_batch(s, c, batch, f"a{i}_") for i, (s, c) in enumerate(zip(shapes, counts, strict=True)))
    results = tuple(_of_batch(s, c, batch, f"r{i}_") for i, (s, c) in enumerate(zip(call.results, made, strict=True)))
    return Factoring(operands, results, whole=factor_names((*operands, *results)) - names(batch), linear=linear)


def _lead(shape: Shape, count: int) -> Shape:
    return shape[: max(len(shape) - count, 0)]


def _of_batch(shape: Shape, count: int, batch: Dims, prefix: str) -> Dims:
    lead = _lead(shape, count)
    return (*broadcast(lead, batch), *fresh_dims(shape, prefix)[len(lead) :])


def _solved(call: Call) -> Factoring:
    """Solve for the right-hand sides, which are matrices, or vectors where a batch of these fits; linear in them."""
    matrix, side = (operand.shape for operand in call.operands[:2])
    is_vector = len(side) == 1 or (len(side) == len(matrix) - 1 and side == matrix[:-1])
    count = 1 if is_vector else 2
    return _leading_batch_dims(call, (2, count), (count, *[0] * (len(call.results) - 1)), (frozenset({1}),))


def _crossed(call: Call) -> Factoring:
    """Multiply vectors of three along a dim, which stays whole; by default the first of size 3.

    Then a part of a dim before it may be no other dim of size 3: these stay whole, too.
    """
    target, shape = fresh_dims(call.results[0]), call.results[0]
    given = call.arguments.get("dim")
    dim = next(i for i, size in enumerate(shape) if size == integer(3)) if given is None else given % len(shape)
    operands = tuple(broadcast(operand.shape, target) for operand in call.operands)
    stays = range(dim + 1) if given is None else [dim]
    return Factoring(operands, (target,), whole=names(target, stays), linear=EACH)


def _dotted(call: Call) -> Factoring:
    """Multiply vectors along a dim, which is summed."""
    full = fresh_dims(broadcast_shape([operand.shape for operand in call.operands]))
    dim = call.dim(rank=len(full))
    operands = tuple(broadcast(operand.shape, full) for operand in call.operands)
    return Factoring(operands, (tuple(dims for i, dims in enumerate(full) if i != dim),), linear=EACH)


def _normed(call: Call) -> Factoring:
    """Measure vectors or matrices along dims, which stay whole: all of them where none is given."""
    return reduce_dims(call, whole=True)


def _renormed(call: Call) -> Factoring:
    """Shorten what is too long along one dim; that dim passes, all others stay whole."""
    dims = fresh_dims(call.operands[0].shape)
    return Factoring((dims,), (dims,), whole=names(dims) - names(dims, [call.dim()]))


def _traced(call: Call) -> Factoring:
    """Add up a diagonal; both dims stay whole."""
    factoring = reduce_dims(replace(call, arguments={**call.arguments, "dim": None}), linear=True)
    return replace(factoring, whole=factor_names(factoring.operands))


RULES: tuple[Rule, ...] = (
    *rules_for_ops(
        _leading_batch_dims,
        *("linalg_inv", "inverse", "matrix_exp", "linalg_matrix_exp", "linalg_cholesky", "cholesky"),
        *("cholesky_inverse", "linalg_matrix_power", "matrix_power", "pinverse", "linalg_pinv"),
        *("linalg_pinv.atol_rtol_float", "linalg_pinv.atol_rtol_tensor", "linalg_pinv.rcond_tensor"),
        given=(2,),
        made=(2,),
    ),
    *rules_for_ops(_leading_batch_dims, "linalg_inv_ex", "linalg_cholesky_ex", given=(2,), made=(2, 0)),
    *rules_for_ops(_leading_batch_dims, "linalg_det", "det", "logdet", "linalg_cond", given=(2,), made=(0,)),
    *rules_for_ops(_leading_batch_dims, "linalg_slogdet", "slogdet", given=(2,), made=(0, 0)),
    *rules_for_ops(_leading_batch_dims, "linalg_svdvals", "linalg_eigvals", "linalg_eigvalsh", given=(2,), made=(1,)),
    *rules_for_ops(_leading_batch_dims, "linalg_eigh", "linalg_eig", given=(2,), made=(1, 2)),
    *rules_for_ops(_leading_batch_dims, "linalg_svd", "svd", given=(2,), made=(2, 1, 2)),
    *rules_for_ops(_leading_batch_dims, "linalg_qr", given=(2,), made=(2, 2)),
    *rules_for_ops(_leading_batch_dims, "linalg_lu", given=(2,), made=(2, 2, 2)),
    *rules_for_ops(_leading_batch_dims, "linalg_lu_factor", given=(2,), made=(2, 1)),
    *rules_for_ops(_leading_batch_dims, "linalg_lu_factor_ex", given=(2,), made=(2, 1, 0)),
    *rules_for_ops(_leading_batch_dims, "linalg_householder_product", given=(2, 1), made=(2,)),
    *rules_for_ops(_leading_batch_dims, "linalg_solve_triangular", given=(2, 2), made=(2,), linear=(frozenset({1}),)),
    *rules_for_ops(_leading_batch_dims, "cholesky_solve", given=(2, 2), made=(2,), linear=(frozenset({0}),)),
    *rules_for_ops(_leading_batch_dims, "linalg_lu_solve", given=(2, 1, 2), made=(2,), linear=(frozenset({2}),)),
    *rules_for_ops(_leading_batch_dims, "lu_solve", given=(2, 2, 1), made=(2,), linear=(frozenset({0}),)),
    *rules_for_ops(_solved, "linalg_solve", "linalg_solve_ex"),
    *rules_for_ops(_crossed, "cross", "linalg_cross"),
    *rules_for_ops(_dotted, "linalg_vecdot"),
    *rules_for_ops(_normed, "linalg_norm", "linalg_norm.ord_str", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    *rules_for_ops(_renormed, "renorm"),
    *rules_for_ops(_traced, "trace"),
)
