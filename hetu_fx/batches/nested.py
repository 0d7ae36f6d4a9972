"""Batches of sequences as nested tensors (torch.jagged): what a model is given that takes them at their own lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetu_fx.errors import BatchError


def nested_batch(sequences: Sequence[Any], **others: Any) -> dict[str, Any]:
    """Return a batch of a causal language model; made to be the `collate_fn` of a DataLoader over `Pieces`.

    Args:
        sequences: token ids (tensors, lists or bytes), which are their own labels; or mappings of inputs by name,
            each with an entry per token.
        others: further arguments of the model, such as use_cache=False.

    Returns:
        Nested tensors by input (`input_ids` and `labels`), and the others.

    Raises:
        BatchError: there are no sequences, or they have unlike inputs.
    """
    rows = [row if isinstance(row, dict) else {"input_ids": row, "labels": row} for row in sequences]
    if len({tuple(sorted(row)) for row in rows}) != 1:
        raise BatchError(f"sequences have inputs {[sorted(row) for row in rows]}; give one or more, all of the same")
    inputs = {name: [_tensor(row[name]) for row in rows] for name in rows[0]}
    nested = {name: torch.nested.nested_tensor(parts, layout=torch.jagged) for name, parts in inputs.items()}
    return {**nested, **others}


def _tensor(values: Any) -> torch.Tensor:
    return torch.as_tensor(list(values) if isinstance(values, bytes) else values)
