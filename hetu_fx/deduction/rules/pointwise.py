"""Pointwise ops, and those that make tensors: every factor passes through, operands are broadcast from the right.

They differ in what they are linear in: sums jointly in all operands, products in each, quotients in the
dividend, casts between floats and copies in their operand. Of what is made, sequences that count up stay whole.

What makes random numbers equal under every plan is another matter (transforms): here it is only said which calls draw,
and where those that draw by counter are told which part of the whole tensor they draw.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetu_fx.deduction.rules.build import (
    FIRST,
    broadcast,
    fresh_dims,
    keep_dims,
    lines,
    literals,
    names,
    replace_dims,
    rules_for_ops,
)
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.forms import KEEPS_ZEROS, OpTraits
from hetu_fx.deduction.rules.rule import Factoring, LiteralSize, Rule
from hetu_fx.deduction.rules.size import integer

LinearSets = tuple[frozenset[int], ...]


def pointwise(call: Call, linear: LinearSets = ()) -> Factoring:
    """Broadcast all operands to the result; every factor passes through."""
    target = fresh_dims(call.results[0])
    operands = tuple(broadcast(operand.shape, target) for operand in call.operands)
    return Factoring(operands, tuple(fresh_dims(shape) for shape in call.results), linear=linear)


def _elementwise_copy(call: Call) -> Factoring:
    """Copy, cast or negate; linear between numbers of one kind, real and complex ones being one."""
    same_kind = call.operands[0].is_float == call.result_float and not call.result_bool
    return pointwise(call, FIRST if same_kind else ())


def _multiplication(call: Call) -> Factoring:
    """Multiply; linear in each operand."""
    return pointwise(call, tuple(frozenset({i}) for i in range(len(call.operands))))


def division(call: Call) -> Factoring:
    """Divide; linear in the dividend unless it rounds."""
    rounds = call.arguments.get("rounding_mode") is not None
    return pointwise(call, () if rounds else FIRST)


def addition(call: Call) -> Factoring:
    """Add, subtract or choose by a mask; jointly linear in the tensors, if no number other than 0 is one of these."""
    numbers = [call.arguments.get(name) for name in ("self", "other") if call.position(name) is None]
    terms = frozenset(i for i, operand in enumerate(call.operands) if operand.argument != "condition")
    return pointwise(call, (terms,) if all(map(_is_zero, numbers)) else ())


def _masked_fill_rule(call: Call) -> Factoring:
    """Overwrite where a mask holds; linear in the tensor if the number written is 0."""
    return pointwise(call, FIRST if _is_zero(call.arguments.get("value")) else ())


def _meshed(call: Call) -> Factoring:
    """Broadcast tensors of one dim along each other's dims; jointly linear."""
    dims, count = fresh_dims(call.results[0]), len(call.operands)
    order = list(range(count))
    if call.arguments.get("indexing") == "xy":
        order[:2] = reversed(order[:2])
    operands = tuple((dims[place],) if call.operands[i].shape else () for i, place in enumerate(order))
    return Factoring(operands, (dims,) * count, linear=(frozenset(range(count)),))


def _gated_linear_unit(call: Call) -> Factoring:
    """Scale one half of a dim by what the other says: the dim is (halves, rest), and the rest passes."""
    result, dim = fresh_dims(call.results[0]), call.dim()
    rest = result[dim]
    sizes = {"halves": integer(2)} | {name: call.results[0][dim] for name in rest}
    operand = replace_dims(result, {dim: ("halves", *rest)})
    return Factoring((operand,), (result,), sizes, frozenset({"halves"}))


def _sloped(call: Call) -> Factoring:
    """Scale what is negative by a slope for each channel, which is dim 1, or by one for all."""
    dims, slope = fresh_dims(call.operands[0].shape), call.operands[1].shape
    channel = dims[min(1, len(dims) - 1)] if dims else ()
    return Factoring((dims, broadcast(slope, (channel,) * len(slope))), (dims,))


def _cast_like(call: Call) -> Factoring:
    """Cast to the dtype of another tensor, which is not read."""
    dims = fresh_dims(call.operands[0].shape)
    other = fresh_dims(call.operands[1].shape, "u")
    return Factoring((dims, other), (dims,), linear=FIRST if call.result_float else (), unread=frozenset({1}))


def constant(call: Call, random: bool = False) -> Factoring:
    """Make a constant or random tensor of a given size; an operand only lends its dtype and device."""
    dims = fresh_dims(call.results[0])
    operands = tuple(fresh_dims(operand.shape, "u") for operand in call.operands)
    unread = frozenset(i for i, operand in enumerate(call.operands) if operand.argument == "self")
    return Factoring(operands, (dims,), literals=literals(call, "size", dims), unread=unread, random=random)


def counting(call: Call) -> Factoring:
    """Count up; whole, as values depend on the position, unless they are positions inside the shard."""
    dims = fresh_dims(call.results[0])
    if call.routed:
        return Factoring((), (dims,), literals=tuple(LiteralSize(call.at("end"), dim) for dim in dims))
    operands = tuple(fresh_dims(operand.shape, "u") for operand in call.operands)
    return Factoring(operands, (dims,), whole=names(dims))


def dropout(call: Call) -> Factoring:
    """Drop elements, or whole channels, at random in training."""
    draws = bool(call.arguments.get("train", True)) and call.arguments.get("p", 0.5) != 0
    return replace(keep_dims(call), random=draws)


def _drawn_like(call: Call) -> Factoring:
    """Draw a tensor of another's shape."""
    return replace(keep_dims(call), random=True)


def _drawn_by_counter(call: Call) -> Factoring:
    """Draw for every element of the first operand; every device reads the whole state."""
    dims = fresh_dims(call.operands[0].shape)
    return Factoring((dims, (("state",),)), (dims,), whole=frozenset({"state"}))


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


COPIES = """
    clone contiguous detach alias neg to.dtype to.device to.dtype_layout _to_copy
""".split()
OTHER_COPIES = """
    lift_fresh_copy lift_fresh positive deg2rad rad2deg negative conj resolve_conj resolve_neg _conj
    conj_physical real imag
""".split()
ZERO_AT_ZERO = """
    abs asin asinh atan atanh celu elu erf expm1 gelu hardshrink hardswish leaky_relu log1p mish relu
    relu6 selu sgn sign silu sin sinh softshrink sqrt square tan tanh
""".split()
UNARY = """
    acos acosh bitwise_not ceil cos cosh digamma erfc erfinv exp exp2 floor frac hardsigmoid hardtanh
    isfinite isinf isnan lgamma log log10 log2 log_sigmoid logical_not logit nan_to_num round
    rsqrt sigmoid signbit sinc softplus threshold trunc fix i0 add.Scalar sub.Scalar rsub.Scalar
    pow.Tensor_Scalar pow.Scalar remainder.Scalar fmod.Scalar floor_divide.Scalar clamp clamp_min
    clamp_max clip eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar __and__.Scalar
    __or__.Scalar __xor__.Scalar bitwise_and.Scalar bitwise_or.Scalar zeros_like ones_like empty_like
    full_like absolute arccos arccosh arcsin arcsinh arctan arctanh greater.Scalar greater_equal.Scalar
    less.Scalar less_equal.Scalar not_equal.Scalar angle
""".split()
BINARY = """
    rsub.Tensor pow.Tensor_Tensor remainder.Tensor fmod.Tensor floor_divide atan2 maximum minimum fmax fmin
    max.other min.other hypot logaddexp xlogy.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor
    ge.Tensor isclose logical_and logical_or logical_xor __and__.Tensor __or__.Tensor __xor__.Tensor
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor clamp.Tensor addcdiv addcmul lerp.Scalar
    lerp.Tensor copysign.Tensor polar complex heaviside arctan2 greater.Tensor greater_equal.Tensor less.Tensor
    less_equal.Tensor not_equal.Tensor
""".split()
CONSTANTS = "zeros ones empty.memory_format full new_zeros new_ones new_full new_empty".split()
COUNTING = "arange arange.start arange.start_step linspace eye eye.m scalar_tensor hann_window".split()

RULES: tuple[Rule, ...] = (
    *rules_for_ops(_elementwise_copy, *COPIES, traits=KEEPS_ZEROS),
    *rules_for_ops(_elementwise_copy, *OTHER_COPIES),
    *rules_for_ops(pointwise, *ZERO_AT_ZERO, traits=KEEPS_ZEROS),
    *rules_for_ops(pointwise, *UNARY, *BINARY),
    *rules_for_ops(pointwise, "reciprocal", traits=OpTraits(inverse=frozenset({0}))),
    *rules_for_ops(addition, "add.Tensor", "sub.Tensor", "subtract.Tensor"),
    *rules_for_ops(_multiplication, "mul.Tensor", traits=OpTraits(vanishing=frozenset({0, 1}))),
    *rules_for_ops(_multiplication, "mul.Scalar", traits=KEEPS_ZEROS),
    *rules_for_ops(_multiplication, "multiply.Tensor", "multiply.Scalar"),
    *rules_for_ops(
        division, "div.Tensor", "div.Scalar", traits=OpTraits(vanishing=frozenset({0}), inverse=frozenset({1}))
    ),
    *rules_for_ops(division, "true_divide.Tensor", "divide.Tensor", traits=OpTraits(inverse=frozenset({1}))),
    *rules_for_ops(division, "div.Tensor_mode", "divide.Tensor_mode"),
    *rules_for_ops(addition, "where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar"),
    *rules_for_ops(_masked_fill_rule, "masked_fill.Scalar", "masked_fill.Tensor"),
    *rules_for_ops(pointwise, "fill.Scalar", "fill.Tensor"),
    *rules_for_ops(_cast_like, "to.other", "type_as"),
    *rules_for_ops(_meshed, "meshgrid", "meshgrid.indexing"),
    *rules_for_ops(_gated_linear_unit, "glu"),
    *rules_for_ops(_sloped, "prelu"),
    *rules_for_ops(constant, *CONSTANTS),
    *rules_for_ops(constant, "rand", "randn", random=True),
    *rules_for_ops(counting, *COUNTING),
    *rules_for_ops(dropout, "dropout", "native_dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    *rules_for_ops(_drawn_like, "rand_like", "randn_like", "bernoulli", "bernoulli.p"),
    *rules_for_ops(_drawn_by_counter, "hetu.uniform.default", traits=OpTraits(counter_at=4)),
    *rules_for_ops(_drawn_by_counter, "hetu.dropout.default", traits=OpTraits(counter_at=5)),
    *lines("..., [b] -> ...", "bucketize.Tensor"),
)
TAG_RULE = Rule("*.*.*", pointwise, "ops that torch tags as pointwise")
