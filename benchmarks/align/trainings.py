"""Trainings in a way of running ops: the losses of a kind of device, honest or faulty."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.align.faults import by_a_transposed_dim
from benchmarks.families.batches import VOCABULARY
from benchmarks.families.families import FAMILIES
from hetu_fx.graph.graph import LeafKind
from hetu_fx_align.interpret import call_of, graph_to_align, interpret, loss_of_graph, values_of_leaves
from hetu_fx_align.losses import STEPS
from hetu_fx_align.way import WAYS, Runner, Way

FAMILY, ROWS, LENGTH, RATE = "gpt2", 4, 11, 1e-3
HONEST = WAYS["bf16"]
FAULTY: Mapping[str, Way] = {
    "attention laid out the other way round": Way(
        "faulty",
        replaced={
            "aten.scaled_dot_product_attention.default": lambda op, *args, **kw: by_a_transposed_dim(op(*args, **kw))
        },
    ),
    "gradients of layer norm lost": Way(
        "faulty", replaced={"aten.layer_norm.default": lambda op, x, *args: op(x.detach(), *args)}
    ),
    "layer norm 10 % too large": Way("faulty", replaced={"aten.layer_norm.default": lambda op, *args: op(*args) * 1.1}),
}


def losses_in(way: Way, steps: int = STEPS) -> list[float]:
    """Train a tiny language model with AdamW in float32, its ops run in a way; return the loss of every step."""
    torch.manual_seed(0)
    model = FAMILIES[FAMILY].make().float()
    optimizer, runner = torch.optim.AdamW(model.parameters(), lr=RATE), Runner(way)
    graph, losses = graph_to_align(model, _batch(0)), []
    trained = {leaf.node: model.get_parameter(leaf.name) for leaf in graph.leaves_of(LeafKind.PARAMETER)}

    def visit(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return runner.run(way.adapt_call(call_of(node, args, kwargs)))

    for step in range(steps):
        leaves = {**values_of_leaves(graph, model, _batch(step)), **trained}
        loss = loss_of_graph(graph, interpret(graph, leaves, visit)).float()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@cache
def reference_losses() -> tuple[float, ...]:
    """Return the losses in float32, trained once."""
    return tuple(losses_in(WAYS["fp32"]))


def _batch(step: int) -> dict[str, Tensor]:
    """Return sentences of a language in which a word tells the next one, or any other follows, one time in four."""
    source = torch.Generator().manual_seed(1000 + step)
    words = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=source)
    surprising = torch.rand(ROWS, LENGTH, generator=source) < 0.25
    for place in range(1, LENGTH):
        follows = words[:, place - 1] * 5 % (VOCABULARY - 1) + 1
        words[:, place] = torch.where(surprising[:, place], words[:, place], follows)
    return {"input_ids": words, "labels": words.clone()}
