"""What a model is called with: a call's batch, and the form of it, which tells which captured programs can run it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

from hetu_fx.errors import BatchError
from hetu_fx.graph.bind import Batch, GivenBatch
from hetu_fx.graph.example import order_in_memory
from hetu_fx.graph.tracing.autocasts import ambient_autocasts


def batch_from_call(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
    """Return a call's batch: by keyword, or positional where the forward of this signature takes *args.

    Raises:
        BatchError: the arguments do not fit the forward.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BatchError(f"the batch does not fit the model's forward: {error}") from error
    batch: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                return (*bound.args,)
            case inspect.Parameter.VAR_KEYWORD:
                batch.update(value)
            case _:
                batch[name] = value
    return {name: value for name, value in batch.items() if value is not None}


def quick_batch_form(given: GivenBatch) -> tuple[Any, ...]:
    """Return what is equal for batches of tensors alone that have one form and one size; quicker than the form."""
    kinds = [(tensor.dtype, tensor.shape, tensor.device, order_in_memory(tensor)) for tensor in given.tensors.values()]
    return given.structure, kinds, ambient_autocasts(), torch.get_default_dtype()


def batch_form(given: GivenBatch, training: bool, passed: Collection[str] = ()) -> str:
    """Return a text that is equal for batches that one captured program can run, which does not read what is `passed`.

    A forward passes plain values of these names on, or leaves them alone.
    """
    parts = [f"{name}:{_short(t.dtype)}[{t.dim()}]" for name, t in sorted(given.tensors.items())]
    parts += sorted(f"{name}={text}" for name, text in given.plain(passed).items())
    parts += sorted(f"{name}:{kind}" for name, kind in given.objects.items())
    parts += [f"autocast {kind} {_short(dtype)}" for kind, dtype in ambient_autocasts()]
    parts += [f"default {_short(torch.get_default_dtype())}"]
    return ("training " if training else "evaluation ") + " ".join(parts)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
