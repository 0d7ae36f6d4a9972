"""DDP in the contest on sequences of mixed lengths, and what its devices would have to hold."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kit.contest import adamw
from benchmarks.kit.models import llama
from benchmarks.lengths.contest import Scale, Texts, Took
from hetu_fx.batches.packing import IGNORED, Filling, fill_rows


class Grouped:
    """DDP: sequences of like lengths side by side, padded, in micro-batches that a device holds.

    A sequence that no device holds runs alone all the same, which is more than the devices of the others may do.
    """

    def __init__(self, scale: Scale, batches: Sequence[Texts]) -> None:
        self.held, self._batches = scale.held, iter(batches)
        self.model = DistributedDataParallel(llama(scale.size))
        self.optimizer = adamw(self.model)

    def train(self) -> Took:
        """Train on the next batch."""
        start = time.process_time()
        self.optimizer.zero_grad()
        self._train(next(self._batches))
        self.optimizer.step()
        used = time.process_time() - start
        return Took(used, used)

    def _train(self, batch: Texts) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        predicted = sum(len(text) - 1 for text in batch) / world  # DDP takes the mean over ranks
        groups = self._groups(sorted(batch, key=len, reverse=True)[rank::world])
        for number, group in enumerate(groups):
            rows = _padded(group)
            valid = int((rows["labels"][:, 1:] != IGNORED).sum())
            with self.model.no_sync() if number + 1 < len(groups) else nullcontext():
                (self.model(**rows, use_cache=False).loss * (valid / predicted)).backward()

    def _groups(self, own: Texts) -> list[list[torch.Tensor]]:
        groups: list[list[torch.Tensor]] = []
        for text in own:  # the longest of a group comes first, and pads the others
            if not groups or (len(groups[-1]) + 1) * len(groups[-1][0]) > max(self.held, len(groups[-1][0])):
                groups.append([])
            groups[-1].append(text)
        return groups


def _padded(group: Texts) -> Mapping[str, torch.Tensor]:
    rows = [(index,) for index in range(len(group))]
    return fill_rows({"input_ids": group, "labels": group}, rows, len(group[0]), Filling({"labels": IGNORED}))


def kept_over_limit(scale: Scale, batches: Sequence[Texts]) -> float:
    """Return how many times what a device holds DDP's longest sequence keeps for its backward, measured."""
    model = llama(scale.size)
    longest = max(len(text) for texts in batches for text in texts)
    return _kept_bytes(model, longest) / _kept_bytes(model, scale.held)


def _kept_bytes(model: nn.Module, tokens: int) -> int:
    """Return the bytes that a forward of one row keeps for its backward, without the parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.ones(1, tokens, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(input_ids=ids, labels=ids, use_cache=False)
    del output
    return sum(kept.values())
