"""What torch draws, each law made of numbers from [0, 1) by its formula: a draw does not depend on the plan."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hetu_fx.base.dtypes import is_complex, is_real
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, arguments, operand
from hetu_fx.graph.edit import cast, insert
from hetu_fx.graph.meta import sum_dtype

aten = torch.ops.aten

Uniform = Callable[[fx.Node, fx.Node, torch.dtype], fx.Node]
"""Draws from [0, 1) before a node, for every element of a value, in a real floating dtype."""
Law = Callable[[Uniform, fx.Node], fx.Node | None]
"""Writes out what an op draws; None where it draws nothing."""

LEAST = 2.0**-126  # the smallest normal number of float32: an exponential number is that or larger


def _work_dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype in which a law is computed: whole numbers and halves are rounded in the end."""
    dtype = meta.dtype(node)
    return sum_dtype(dtype) if is_real(dtype) else torch.float64


def _in_parts(node: fx.Node, like: fx.Node, law: Callable[[fx.Node, torch.dtype], fx.Node]) -> fx.Node:
    """Draw by a law, of a complex dtype the real and the imaginary part each, in the dtype of a node."""
    dtype = meta.dtype(node)
    if not is_complex(dtype):
        return cast(node, law(like, _work_dtype(node)), dtype)
    shaped = insert(node, aten.abs.default, like) if is_complex(meta.dtype(like)) else like
    parts = [law(shaped, dtype.to_real()) for _ in range(2)]
    return insert(node, aten.complex.default, *parts)


def standard_normal(uniform: Uniform, node: fx.Node, like: fx.Node) -> fx.Node:
    """Draw from the standard normal distribution by Box and Muller's formula, from two sites.

    Of a complex dtype, real and imaginary part have a variance of a half, as torch's have.
    """

    def law(shaped: fx.Node, work: torch.dtype) -> fx.Node:
        log = _log_of_uniform(uniform, node, shaped, work)
        second = uniform(node, shaped, work)
        radius = insert(node, aten.sqrt.default, insert(node, aten.mul.Tensor, log, factor))
        angle = insert(node, aten.cos.default, insert(node, aten.mul.Tensor, second, 2 * math.pi))
        return insert(node, aten.mul.Tensor, radius, angle)

    factor = -1.0 if is_complex(meta.dtype(node)) else -2.0
    return _in_parts(node, like, law)


def _log_of_uniform(uniform: Uniform, node: fx.Node, like: fx.Node, work: torch.dtype) -> fx.Node:
    """Return the logarithm of numbers from (0, 1]."""
    return insert(node, aten.log.default, insert(node, aten.rsub.Scalar, uniform(node, like, work), 1.0))


def _scaled(node: fx.Node, drawn: fx.Node, scale: Any, shift: Any) -> fx.Node:
    """Return scale * drawn + shift; both may be tensors, which a draw has no gradient to."""
    if not _is_number(scale, 1):
        drawn = insert(node, aten.mul.Tensor, drawn, _value(node, scale))
    return drawn if _is_number(shift, 0) else insert(node, aten.add.Tensor, drawn, _value(node, shift))


def _is_number(given: Any, number: float) -> bool:
    return not isinstance(given, fx.Node) and given == number


def _value(node: fx.Node, given: Any) -> Any:
    is_tensor = isinstance(given, fx.Node) and meta.is_tensor(given)
    return insert(node, aten.detach.default, given) if is_tensor else given


def _like(node: fx.Node) -> fx.Node:
    """Return a value of the shape of what a node draws: its first tensor, or zeros of the sizes it is given."""
    if "size" not in arguments(node):
        return operand(node)
    options = {name: node.kwargs[name] for name in ("device",) if name in node.kwargs}
    return insert(node, aten.zeros.default, argument(node, "size"), dtype=meta.dtype(node), **options)


def _normal(uniform: Uniform, node: fx.Node) -> fx.Node:
    given = arguments(node)
    mean, deviation = given.get("mean", 0.0), given.get("std", 1.0)
    tensors = [x for x in (mean, deviation) if isinstance(x, fx.Node) and meta.is_tensor(x)]
    like = insert(node, aten.add.Tensor, *tensors) if len(tensors) > 1 else tensors[0] if tensors else _like(node)
    return cast(node, _scaled(node, standard_normal(uniform, node, like), deviation, mean), meta.dtype(node))


def _uniform(uniform: Uniform, node: fx.Node) -> fx.Node:
    given = arguments(node)
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    drawn = _in_parts(node, _like(node), lambda shaped, work: uniform(node, shaped, work))
    return _scaled(node, drawn, high - low, low)


def _log_normal(uniform: Uniform, node: fx.Node) -> fx.Node:
    return insert(node, aten.exp.default, _normal(uniform, node))


def exponential(uniform: Uniform, node: fx.Node, like: fx.Node, rate: Any = 1.0) -> fx.Node:
    """Draw from the exponential distribution; never zero."""
    log = _log_of_uniform(uniform, node, like, _work_dtype(like))
    return insert(node, aten.clamp_min.default, insert(node, aten.mul.Tensor, log, -1.0 / rate), LEAST)


def _exponential(uniform: Uniform, node: fx.Node) -> fx.Node:
    drawn = exponential(uniform, node, operand(node), argument(node, "lambd"))
    return cast(node, drawn, meta.dtype(node))


def _cauchy(uniform: Uniform, node: fx.Node) -> fx.Node:
    centred = insert(node, aten.sub.Tensor, uniform(node, operand(node), _work_dtype(node)), 0.5)
    drawn = insert(node, aten.tan.default, insert(node, aten.mul.Tensor, centred, math.pi))
    return cast(node, _scaled(node, drawn, argument(node, "sigma"), argument(node, "median")), meta.dtype(node))


def _geometric(uniform: Uniform, node: fx.Node) -> fx.Node:
    p = argument(node, "p")
    log = _log_of_uniform(uniform, node, operand(node), _work_dtype(node))
    trials = insert(node, aten.mul.Tensor, log, 1 / math.log1p(-p) if p < 1 else 0.0)
    counted = insert(node, aten.clamp_min.default, insert(node, aten.ceil.default, trials), 1.0)
    return cast(node, counted, meta.dtype(node))


def _integers(uniform: Uniform, node: fx.Node) -> fx.Node:
    """Draw whole numbers from [low, high)."""
    given = arguments(node)
    low = given.get("low", given.get("from", 0)) or 0
    high = given["high"] if "high" in given else given["to"]
    span = high if low == 0 else _difference(node, high, low)
    drawn = insert(node, aten.mul.Tensor, uniform(node, _like(node), torch.float64), _value(node, span))
    return cast(node, _scaled(node, insert(node, aten.floor.default, drawn), 1, low), meta.dtype(node))


def _difference(node: fx.Node, high: Any, low: Any) -> Any:
    is_symbolic = isinstance(high, fx.Node) or isinstance(low, fx.Node)
    return insert(node, operator.sub, high, low) if is_symbolic else high - low


def _bernoulli(uniform: Uniform, node: fx.Node) -> fx.Node:
    given = arguments(node)
    probability = given.get("p", operand(node))
    drawn = uniform(node, operand(node), torch.float32)
    less = aten.lt.Tensor if isinstance(probability, fx.Node) else aten.lt.Scalar
    return insert(node, aten.to.dtype, insert(node, less, drawn, probability), meta.dtype(node))


def _rrelu(uniform: Uniform, node: fx.Node) -> fx.Node | None:
    """Scale what is not positive by slopes that are drawn."""
    x, low, high, training = (argument(node, name) for name in ("self", "lower", "upper", "training"))
    if not training:
        return None
    slope = cast(node, _scaled(node, uniform(node, x, _work_dtype(node)), high - low, low), meta.dtype(node))
    is_negative = insert(node, aten.le.Scalar, x, 0)
    return insert(node, aten.where.self, is_negative, insert(node, aten.mul.Tensor, x, slope), x)


def _multinomial(uniform: Uniform, node: fx.Node) -> fx.Node:
    """Draw classes: without replacement the first of a race of exponential times, with it by the sums of weights."""
    weights, count = insert(node, aten.detach.default, operand(node)), argument(node, "num_samples")
    if _is_number(count, 1) or not argument(node, "replacement"):
        times = exponential(uniform, node, weights)
        race = insert(node, aten.div.Tensor, cast(node, weights, meta.dtype(times)), times)
        return insert(node, operator.getitem, insert(node, aten.topk.default, race, count, -1), 1)
    sums = insert(node, aten.cumsum.default, weights, -1, dtype=torch.float64)
    total = insert(node, aten.slice.Tensor, sums, -1, -1)
    shape = [*([-1] * (len(meta.shape(weights)) - 1)), count]
    drawn = uniform(node, insert(node, aten.expand.default, total, shape), torch.float64)
    reached = insert(node, aten.unsqueeze.default, insert(node, aten.mul.Tensor, drawn, total), -1)
    passed = insert(node, aten.le.Tensor, insert(node, aten.unsqueeze.default, sums, -2), reached)
    return insert(node, aten.sum.dim_IntList, passed, [-1])


def _permutation(uniform: Uniform, node: fx.Node) -> fx.Node:
    options = {name: node.kwargs[name] for name in ("device",) if name in node.kwargs}
    zeros = insert(node, aten.zeros.default, [argument(node, "n")], dtype=torch.float64, **options)
    order = insert(node, aten.argsort.default, uniform(node, zeros, torch.float64))
    return cast(node, order, meta.dtype(node))


LAWS: dict[Any, Law] = {
    **dict.fromkeys((aten.rand.default, aten.rand_like.default, aten.uniform.default), _uniform),
    **dict.fromkeys((aten.randn.default, aten.randn_like.default, aten.normal_functional.default), _normal),
    **dict.fromkeys((aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor), _normal),
    aten.normal.float_float: _normal,
    aten.log_normal.default: _log_normal,
    aten.exponential.default: _exponential,
    aten.cauchy.default: _cauchy,
    aten.geometric.default: _geometric,
    **dict.fromkeys((aten.randint.default, aten.randint.low, aten.random.to), _integers),
    **dict.fromkeys((aten.randint_like.default, aten.randint_like.low_dtype, aten.randint_like.Tensor), _integers),
    **dict.fromkeys((aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor), _bernoulli),
    aten.rrelu.default: _rrelu,
    aten.multinomial.default: _multinomial,
    aten.randperm.default: _permutation,
}
"""How each op draws."""
