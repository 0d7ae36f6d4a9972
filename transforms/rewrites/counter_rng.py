"""Draw random numbers by counter, so that they do not depend on the plan.

Attention that drops weights out, and recurrent layers with dropout between them, are written out first, so that their
dropout is made like any other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from hetu_fx.base.dtypes import is_complex, is_real
from hetu_fx.graph import meta
from hetu_fx.graph.calls import argument, arguments, draws, operand, overload
from hetu_fx.graph.edit import Rewrite, add_leaf, cast, insert, replace
from hetu_fx.graph.graph import Graph, LeafKind
from hetu_fx.graph.leaves.leaf_ops import LEAF
from hetu_fx.graph.meta import HALVES, sum_dtype
from hetu_fx.transforms.rewrites import random_ops  # noqa: F401 - registers hetu::dropout and hetu::uniform
from hetu_fx.transforms.rewrites.counts import linear_factor

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


DROPOUT, UNIFORM = torch.ops.hetu.dropout.default, torch.ops.hetu.uniform.default

STATE = "random_state"
SELU_ALPHA = 1.7580993408473766  # alpha * scale of SELU, the value alpha dropout drops to (torch's constant)
RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def _with_dropout_apart(node: fx.Node, drop: Callable[[fx.Node, float], fx.Node]) -> None:
    """Replace layers with dropout between them by as many ops of one layer; leave others as they are.

    Args:
        node: a call of one of RECURRENT; its results are read by getitem nodes.
        drop: inserts a dropout of a value, with a probability, before the node.
    """
    value, states, params, has_biases, layers, p, train, both_ways, batch_first = arguments(node).values()
    if not (p and train and layers > 1):
        return
    several = isinstance(states, list | tuple)
    ways, per_layer = 2 if both_ways else 1, len(params) // layers
    after: list[list[fx.Node]] = []
    for layer in range(layers):
        own = [_of_layer(node, state, layer * ways, ways) for state in (states if several else [states])]
        weights = list(params[layer * per_layer : (layer + 1) * per_layer])
        given = (value, own if several else own[0], weights, has_biases, 1, 0.0, train, both_ways, batch_first)
        call = _one_layer(node, given, own)
        value, *ends = (insert(node, operator.getitem, call, i) for i in range(1 + len(own)))
        after.append(ends)
        if layer + 1 < layers:
            value = drop(value, p)
    _replace_results(node, value, list(zip(*after, strict=True)))


def _one_layer(node: fx.Node, given: tuple[Any, ...], states: Sequence[fx.Node]) -> fx.Node:
    """Insert a call for one layer, whose results look like those of all of them, but for the number of states."""
    with node.graph.inserting_before(node):
        call: fx.Node = node.graph.call_function(overload(node), given)
    meta.copy_meta(node, call)
    meta.set_value(call, (meta.value(node)[0], *map(meta.value, states)))
    return call


def _of_layer(here: fx.Node, state: Any, first: int, count: int) -> fx.Node:
    return insert(here, aten.slice.Tensor, state, 0, first, first + count)


def _replace_results(node: fx.Node, value: fx.Node, states: Sequence[Sequence[fx.Node]]) -> None:
    """Let those that read results of a node read these; the states of layers are joined where somebody reads them."""
    for item in list(node.users):
        index = item.args[1]
        assert isinstance(index, int), "results of an op are read by their places"
        replace(item, value if index == 0 else insert(node, aten.cat.default, list(states[index - 1])))
    node.graph.erase_node(node)


def draws_by_token(graph: Graph) -> bool:
    """Tell whether something is drawn by indices that count more than rows, so that row lengths matter."""
    drawn = (node for node in graph.graph.nodes if node.target in (DROPOUT, UNIFORM))
    return any(isinstance(number, fx.Node) for node in drawn for number in argument(node, "rows"))


def with_random_state(graph: Graph) -> tuple[Graph, fx.Node]:
    """Return a graph with a leaf for the random state, which it may have already, and the leaf."""
    known = graph.leaves_of(LeafKind.RANDOM_STATE)
    return (graph, known[0].node) if known else add_leaf(graph, LeafKind.RANDOM_STATE, STATE, (3,), torch.int64)


@dataclass(frozen=True)
class Randomness:
    """Replace every random op by one that draws from (seed, step, site, global index).

    Requires: a captured graph.
    Ensures: no op draws from a generator, except those that are noted. The graph has one leaf of kind
        RANDOM_STATE, int64[3] on the cpu (seed, step, first row), if anything is drawn at all. Sites are numbered
        in the order of the graph. Attention with dropout is written out.

        %y = dropout(%x, 0.1, True)     ->     %y = hetu.dropout(%x, 0.1, %random_state, 0, [0, 1, 1, 1], [])
    """

    name: ClassVar[str] = "randomness"

    def __call__(self, graph: Graph) -> Graph:
        return _RandomnessRewrite(graph).run()


class _RandomnessRewrite(Rewrite):
    """Rewrites ops that draw."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.sites = 0
        self.rules: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
            aten.dropout.default: self._dropout,
            aten.native_dropout.default: self._native_dropout,
            aten.feature_dropout.default: self._feature_dropout,
            aten.alpha_dropout.default: self._alpha_dropout,
            aten.feature_alpha_dropout.default: self._alpha_dropout,
            aten.scaled_dot_product_attention.default: self._attention,
            **dict.fromkeys(RECURRENT, self._recurrent),
            LEAF: self._leaf,
        }

    def visit(self, node: fx.Node) -> None:
        """Rewrite a node if it draws; note it if it draws in a way that is not known."""
        rule, law = self.rules.get(node.target), LAWS.get(node.target)
        if rule is None and law is None:
            if draws(node):
                self._note(node)
            return
        new = rule(node) if rule is not None else law(self.uniform, node) if law is not None else None
        if new is not None:
            replace(node, new)

    def _note(self, node: fx.Node) -> None:
        self.notes.append(
            f"{node.target} at {meta.source_line(node)} draws its numbers on each device by itself: they depend "
            "on the plan"
        )

    def _state(self) -> fx.Node:
        self.graph, node = with_random_state(self.graph)
        return node

    def _place(self, shaped: fx.Node) -> tuple[fx.Node, int, list[int | fx.Node], list[int]]:
        """Return state, site, rows and cut of the next draw for a tensor shaped like `shaped`.

        Rows are taken to stand outermost in their dim; where they do not, `specialize` knows it.
        """
        site, self.sites = self.sites, self.sites + 1
        for dim, size in enumerate(meta.shape(shaped)):
            if meta.depends_on_batch(size, self.graph):
                factor = linear_factor(meta.expression(size), self.graph.batch_symbol)
                length = None if factor is None else self.sizes.of_expression(factor)
                if length is None:
                    self._note(shaped)
                    break
                return self._state(), site, [dim, length, length, 1], []
        return self._state(), site, [], []

    def drop(self, here: fx.Node, value: fx.Node, p: float) -> fx.Node:
        """Insert a dropout of `value`."""
        state, *place = self._place(value)
        return insert(here, DROPOUT, value, p, state, *place)

    def uniform(self, here: fx.Node, like: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Insert a draw from [0, 1) for every element of `like`, of whose values it knows nothing: nor of gradients."""
        shaped = cast(here, insert(here, aten.detach.default, like), dtype)
        return insert(here, UNIFORM, shaped, *self._place(like))

    def _dropout(self, node: fx.Node) -> fx.Node | None:
        p = _probability(node)
        return self.drop(node, operand(node), p) if p else None

    def _native_dropout(self, node: fx.Node) -> None:
        p = _probability(node)
        kept = next((user for user in node.users if user.args[1] == 0), None)
        if not p or kept is None:
            return
        if len(node.users) > 1:
            self._note(node)
            return
        replace(kept, self.drop(node, operand(node), p))
        node.graph.erase_node(node)

    def _feature_dropout(self, node: fx.Node) -> fx.Node | None:
        """Drop whole channels: the same number for all of a channel's positions."""
        value, p = operand(node), _probability(node)
        if not p:
            return None
        ones = insert(node, aten.ones_like.default, _channels(node, value))
        return insert(node, aten.mul.Tensor, value, self.drop(node, ones, p))

    def _alpha_dropout(self, node: fx.Node) -> fx.Node | None:
        """Drop to the negative saturation of SELU, keeping mean and variance (torch's formula)."""
        value, p = operand(node), _probability(node)
        if not 0 < p < 1:
            return None
        a = 1 / math.sqrt((SELU_ALPHA**2 * p + 1) * (1 - p))
        of_channels = node.target is aten.feature_alpha_dropout.default
        ones = insert(node, aten.ones_like.default, _channels(node, value) if of_channels else value)
        kept = insert(node, aten.mul.Tensor, self.drop(node, ones, p), 1 - p)
        scaled = insert(node, aten.mul.Tensor, insert(node, aten.mul.Tensor, value, kept), a)
        shift = insert(node, aten.mul.Tensor, insert(node, aten.sub.Tensor, kept, 1.0 - p), SELU_ALPHA * a)
        return insert(node, aten.add.Tensor, scaled, shift)

    def _attention(self, node: fx.Node) -> fx.Node | None:
        p = argument(node, "dropout_p")
        return _explicit_attention(node, lambda weights: self.drop(node, weights, p)) if p else None

    def _leaf(self, node: fx.Node) -> None:
        """Let a leaf draw from the state, if it draws: all replicas call it on the same rows."""
        values, state, _, _, *rest = arguments(node).values()
        node.args, node.kwargs = (values, state, self._state(), self.sites, *rest), {}
        self.sites += 1

    def _recurrent(self, node: fx.Node) -> None:
        _with_dropout_apart(node, lambda value, p: self.drop(node, value, p))


def _channels(here: fx.Node, value: fx.Node) -> fx.Node:
    """Return one position of every channel."""
    for dim in range(2, len(meta.shape(value))):
        value = insert(here, aten.slice.Tensor, value, dim, 0, 1)
    return value


def _probability(node: fx.Node) -> float:
    """Return how likely a dropout op drops; 0 outside training."""
    return 0.0 if argument(node, "train") is False else float(argument(node, "p"))


Drop = Callable[[fx.Node], fx.Node]


def _explicit_attention(node: fx.Node, drop: Drop) -> fx.Node:
    """Insert softmax(q k^T * scale + mask), dropped by `drop`, times v before an attention node; return it.

    Rows whose every key is masked give zero, as torch's op does.
    """
    query, key, value, mask, _, is_causal, scale, enable_gqa = arguments(node).values()
    if enable_gqa:
        key, value = (_repeated_heads(node, operand, query) for operand in (key, value))
    factor = 1 / math.sqrt(meta.hints(query)[-1]) if scale is None else scale
    scaled = insert(node, aten.mul.Tensor, query, factor)
    scores = insert(node, aten.matmul.default, scaled, insert(node, aten.transpose.int, key, -2, -1))
    blocked = _causal(node, query, key) if is_causal else None
    if mask is not None:
        is_choice = meta.dtype(mask) is torch.bool
        blocked = insert(node, aten.logical_not.default if is_choice else aten.isneginf.default, mask)
        scores = scores if is_choice else insert(node, aten.add.Tensor, scores, mask)
    weights = _softmax(node, scores, blocked, meta.dtype(query))
    return insert(node, aten.matmul.default, drop(weights), value)


def _softmax(node: fx.Node, scores: fx.Node, blocked: fx.Node | None, dtype: torch.dtype) -> fx.Node:
    """Softmax that gives blocked positions zero; the least finite number keeps whole blocked rows from being nan."""
    if blocked is not None:
        least = torch.finfo(meta.dtype(scores)).min
        scores = insert(node, aten.masked_fill.Scalar, scores, blocked, least)
    upper = (torch.float32,) if dtype in HALVES else ()
    weights = cast(node, insert(node, aten.softmax.int, scores, -1, *upper), dtype)
    return weights if blocked is None else insert(node, aten.masked_fill.Scalar, weights, blocked, 0.0)


def _causal(node: fx.Node, query: fx.Node, key: fx.Node) -> fx.Node:
    device = meta.value(query).device
    rank = len(meta.shape(query))
    rows, columns = (
        insert(node, aten.arange.default, _size(node, operand, rank - 2), device=device) for operand in (query, key)
    )
    return insert(node, aten.gt.Tensor, columns, insert(node, aten.unsqueeze.default, rows, 1))


def _repeated_heads(node: fx.Node, operand: fx.Node, query: fx.Node) -> fx.Node:
    """Repeat each head of `operand` as often as the query has heads for it."""
    rank = len(meta.shape(operand))
    heads, wanted = meta.hints(operand)[rank - 3], meta.hints(query)[rank - 3]
    sizes = [_size(node, operand, dim) for dim in range(rank)]
    single = insert(node, aten.unsqueeze.default, operand, rank - 2)
    many = insert(node, aten.expand.default, single, [*sizes[:-2], wanted // heads, *sizes[-2:]])
    return insert(node, aten.reshape.default, many, [*sizes[:-3], wanted, *sizes[-2:]])


def _size(node: fx.Node, operand: fx.Node, dim: int) -> Any:
    size = meta.shape(operand)[dim]
    return insert(node, aten.sym_size.int, operand, dim) if meta.is_symbolic(size) else size
