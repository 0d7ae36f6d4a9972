"""Write recurrent layers out one by one where dropout stands between them, so that it is made like any other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.calls import arguments, overload
from hetu_fx.graph.edit import insert, replace

aten = torch.ops.aten

RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def with_dropout_apart(node: fx.Node, drop: Callable[[fx.Node, float], fx.Node]) -> None:
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
