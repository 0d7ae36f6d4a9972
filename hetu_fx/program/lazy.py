"""Lazy modules, whose parameters have no shapes before the first forward: they get them from the example batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hetu_fx.errors import StateError
from hetu_fx.graph.bind import Batch, as_call
from hetu_fx.graph.capture import in_mode


def initialize_lazy(model: nn.Module, batch: Batch) -> None:
    """Run a model that has lazy parameters once on a batch, so that they get shapes and values.

    It runs in evaluation mode and without gradients: the initial values are drawn from torch's generator, and nothing
    else is. Buffers that had values keep them. Parameters stay the same objects, which an optimizer may hold.

    Raises:
        StateError: the forward fails, or leaves some without shapes.
    """
    names = _lazy(model)
    if not names:
        return
    args, kwargs = as_call(batch)
    try:
        with torch.no_grad(), in_mode(model, training=False), _kept_buffers(model):
            model(*args, **kwargs)
    except Exception as error:  # whatever a forward raises
        raise _refusal(names, f"a forward on the example batch fails: {type(error).__name__}: {error}") from error
    if left := _lazy(model):
        raise _refusal(left, "a forward on the example batch in evaluation mode does not use them")


def check_shapes(model: nn.Module) -> None:
    """Refuse a model with lazy parameters that have no shapes yet.

    Raises:
        StateError: names them.
    """
    if names := _lazy(model):
        raise _refusal(names, "nothing is run here that gives them some")


def _lazy(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers without shapes."""
    return [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if is_lazy(tensor)]


def _refusal(names: list[str], why: str) -> StateError:
    return StateError(
        f"lazy parameters have no shapes ({', '.join(map(repr, names))}), and {why}\n"
        f"hint: run one forward of the model first"
    )


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Give buffers that have values the same ones afterwards, whatever a forward writes to or puts in their place."""
    slots = [(module, name, held) for module in model.modules() for name, held in module.named_buffers(recurse=False)]
    before = [(*slot, slot[2].clone()) for slot in slots if not is_lazy(slot[2])]
    try:
        yield
    finally:
        for module, name, held, value in before:
            held.copy_(value)
            setattr(module, name, held)
