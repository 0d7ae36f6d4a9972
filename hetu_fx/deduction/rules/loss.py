"""Losses: rows are summed away (a mean is partial, weighed by the shard's count); classes may be cut."""

from __future__ import annotations

from hetu_fx.deduction.rules.build import aligned, built, dims_of, names
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.rule import NOTHING, Dims, Factoring, Rule

NONE, MEAN = 0, 1  # torch's codes of the reduction argument; 2 is the sum
CUT_OVER_CLASSES = frozenset(f"aten.{op}.default" for op in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"))


def _classified(call: Call) -> Factoring:
    """Compare scores per class with targets: all dims but the classes are rows.

    The class dim may be cut, if targets are indices (not probabilities) and classes are not weighed.
    """
    shape = call.operands[0].shape
    dims = dims_of(shape)
    at = 1 if len(shape) > 1 else 0
    rows = dims[:at] + dims[at + 1 :]
    operands = tuple(_of_rank(len(op.shape), op.argument, dims, rows, dims[at]) for op in call.operands)
    cut = call.op in CUT_OVER_CLASSES and call.position("weight") is None and operands[1] == rows
    classes = names(dims, [at])
    return _reduced(call, operands, rows, NOTHING if cut else classes, classes if cut else NOTHING)


def _of_rank(rank: int, argument: str, dims: Dims, rows: Dims, classes: tuple[str, ...]) -> Dims:
    if argument == "weight":
        return (classes,)
    return dims if rank == len(dims) else rows


def compared(call: Call) -> Factoring:
    """Compare each element with its target: every dim is rows."""
    target = max((operand.shape for operand in call.operands), key=len)
    sizes = tuple(
        max(
            (op.shape[i - len(target)] for op in call.operands if len(op.shape) >= len(target) - i),
            key=lambda s: s.hint,
        )
        for i in range(len(target))
    )
    operands = tuple(aligned(operand.shape, sizes) for operand in call.operands)
    return _reduced(call, operands, dims_of(sizes), NOTHING, NOTHING)


def _reduced(
    call: Call, operands: tuple[Dims, ...], rows: Dims, whole: frozenset[str], sharded: frozenset[str]
) -> Factoring:
    reduction = call.integer("reduction", MEAN)
    results: tuple[Dims, ...] = (rows if reduction == NONE else (),) + ((),) * (len(call.results) - 1)
    averaged = names(rows, range(len(rows))) if reduction == MEAN else NOTHING
    return Factoring(operands, results, whole=whole, averaged=averaged, sharded=sharded)


RULES: tuple[Rule, ...] = (
    *built(_classified, "cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"),
    *built(
        compared,
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div"),
        *("binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss"),
    ),
)
