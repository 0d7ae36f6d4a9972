"""Recurrences: rows of the batch pass through, time steps and hidden channels stay whole."""

from __future__ import annotations

from hetu_fx.deduction.rules.build import built, dims_of, names, replaced
from hetu_fx.deduction.rules.call import Call
from hetu_fx.deduction.rules.rule import Dims, Factoring, Rule


def _recurred(call: Call) -> Factoring:
    """Run gated cells over time: weights, steps and hidden states are whole, rows pass."""
    at = 0 if call.arguments.get("batch_first") else 1
    operands = tuple(
        _with_rows(dims_of(operand.shape, f"a{i}_"), _row_dim(operand.argument, at))
        for i, operand in enumerate(call.operands)
    )
    places = [at, *(1 for _ in call.results[1:])]
    results = tuple(
        _with_rows(dims_of(shape, f"r{i}_"), place)
        for i, (shape, place) in enumerate(zip(call.results, places, strict=True))
    )
    every = frozenset().union(*(names(dims, range(len(dims))) for dims in (*operands, *results)))
    draws = bool(call.arguments.get("train")) and call.arguments.get("dropout", 0.0) != 0
    return Factoring(operands, results, whole=every - {"rows"}, random=draws)


def _row_dim(argument: str, at: int) -> int | None:
    return {"input": at, "hx": 1}.get(argument)


def _with_rows(dims: Dims, at: int | None) -> Dims:
    return dims if at is None or not dims[at] else replaced(dims, {at: ("rows",)})


RULES: tuple[Rule, ...] = built(_recurred, "gru.input", "lstm.input", "rnn_tanh.input", "rnn_relu.input")
