"""The home tensors of a training state by name: values, gradients, and what optimizers keep; alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.base.torch_private import tree_flatten_with_path
from hetu_fx.comm_ops.wire.consensus import alike, all_gather_object, hash_text, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.home.layout import home_layout
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.migrate.buckets import GRADIENT, VALUE, StateTensor

_INSIDE = "/"  # between the keys of what stands deeper in an optimizer's state

Homes = Mapping[str, nn.Parameter]
Key = tuple[str, str]  # parameter, kind
Others = Mapping[tuple[str, int], Mapping[str, Any]]  # what is no home tensor, by parameter and optimizer


class TrainingState:
    """The home tensors of some parameters and of the optimizers that train them, on this rank.

    Args:
        homes: the home parameters by name.
        optimizers: all that hold state for them.

    Raises:
        StateError: an optimizer holds other parameters, or home tensors that do not lie as a parameter does.
    """

    def __init__(self, homes: Homes, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.homes, self.optimizers = homes, tuple(optimizers)
        check_optimizers(homes, self.optimizers)
        self.tensors: dict[Key, HomeTensor] = {}
        for name, home in homes.items():
            for kind, tensor in self._of(home):
                if tensor.shape != home.shape:
                    raise StateError(
                        f"{kind} of parameter {name!r} is a home tensor of shape {tuple(tensor.shape)}, the parameter "
                        f"has shape {tuple(home.shape)}: nothing says where its parts belong\n"
                        f"hint: make it a plain tensor by full_tensor()"
                    )
                self.tensors[name, kind] = tensor

    def _of(self, home: nn.Parameter) -> Iterator[tuple[str, HomeTensor]]:
        if not isinstance(home, HomeTensor):  # of a rank alone
            return
        yield VALUE, home
        if isinstance(home.grad, HomeTensor):
            yield GRADIENT, home.grad
        for number, optimizer in enumerate(self.optimizers):
            leaves, _ = tree_flatten_with_path(optimizer.state.get(home, {}))
            for path, leaf in leaves:
                if isinstance(leaf, HomeTensor):
                    yield _kind(number, path), leaf

    def describe_tensors(self, targets: Mapping[str, Annotation]) -> tuple[StateTensor, ...]:
        """Describe the tensors that this rank has, and where they are to go (left out: they stay)."""
        return tuple(
            StateTensor(
                name,
                kind,
                tensor.dtype,
                tensor.home_layout.annotation,
                targets.get(name, tensor.home_layout.annotation),
                tuple(tensor.shape),
            )
            for (name, kind), tensor in self.tensors.items()
        )

    def describe_on_all_ranks(self, targets: Mapping[str, Annotation], table: GroupTable) -> tuple[StateTensor, ...]:
        """Describe the tensors that some rank has, the same on all; collective.

        What a rank lacks it gets, with an empty part: an optimizer may pass over parameters of which it holds nothing.

        Raises:
            StateError: on every rank, if ranks have different tensors under one name, or lack one of which they own a
                part.
        """
        mine = self.describe_tensors(targets)
        if table.size == 1 or alike(table, _digest(mine)):
            return mine
        others = raise_on_all_ranks(table, self._others)
        told = all_gather_object(table, (mine, others))
        merged = _merged_state([described for described, _ in told])
        raise_on_all_ranks(table, lambda: self._complete(merged, [plain for _, plain in told], table))
        return merged

    def with_tensors(self, tensors: Mapping[Key, HomeTensor]) -> TrainingState:
        """Return the same state with other tensors in the places of some."""
        other = copy(self)
        other.tensors = {**self.tensors, **tensors}
        return other

    def _others(self) -> Others:
        """Return what optimizers keep that is no home tensor: step counts, and tensors that are whole everywhere."""
        return {
            (name, number): {k: v for k, v in optimizer.state[home].items() if not isinstance(v, HomeTensor)}
            for name, home in self.homes.items()
            for number, optimizer in enumerate(self.optimizers)
            if home in optimizer.state
        }

    def _complete(self, merged: Sequence[StateTensor], others: Sequence[Others], table: GroupTable) -> None:
        """Add empty parts of what this rank lacks, and what stands beside them on the first rank that has it."""
        for told in others:
            for (name, number), plain in told.items():
                state = self.optimizers[number].state[self.homes[name]]
                for key, value in plain.items():
                    state.setdefault(key, value)
        for tensor in merged:
            if (tensor.parameter, tensor.kind) not in self.tensors:
                self.tensors[tensor.parameter, tensor.kind] = self._added(tensor, table)

    def _added(self, tensor: StateTensor, table: GroupTable) -> HomeTensor:
        home = self.homes[tensor.parameter]
        layout = home_layout(tensor.source, tensor.shape, table.rank, table.size)
        empty = torch.empty(layout.local_shape, dtype=tensor.dtype, device=home.device)
        made = HomeTensor(empty, layout)
        if tensor.kind == GRADIENT:
            home.grad = made
            return made
        number, key = _place(tensor.kind)
        self.optimizers[number].state[home][key] = made
        return made


def check_optimizers(homes: Homes, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise StateError for an optimizer of parameters that are none of the model's."""
    known = {id(home) for home in homes.values()}
    for number, optimizer in enumerate(optimizers):
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if strangers:
            raise StateError(
                f"optimizer {number} ({type(optimizer).__name__}) holds {len(strangers)} parameters that are none of "
                f"the model's, the first of shape {tuple(strangers[0].shape)}\nhint: make it from model.parameters()"
            )


def _merged_state(told: Sequence[Sequence[StateTensor]]) -> tuple[StateTensor, ...]:
    """Merge the ranks' descriptions of the state, by rank; a pure function.

    Raises:
        StateError: two ranks describe a tensor differently, or a rank that owns a part of one has none.
    """
    merged: dict[Key, StateTensor] = {}
    for rank, tensors in enumerate(told):
        for tensor in tensors:
            known = merged.setdefault((tensor.parameter, tensor.kind), tensor)
            if known != tensor:
                raise StateError(
                    f"{tensor.kind} of parameter {tensor.parameter!r} is {tensor} on rank {rank}, {known} on another\n"
                    f"hint: do the same to the model and its optimizers on all ranks"
                )
    for rank, tensors in enumerate(told):
        have = {(tensor.parameter, tensor.kind) for tensor in tensors}
        lacking = [t for key, t in merged.items() if key not in have and t.source.holds(rank)]
        if lacking:
            raise StateError(
                f"rank {rank} owns a part of {lacking[0].parameter!r} but has no {lacking[0].kind} of it, which other "
                f"ranks have ({len(lacking)} such tensors)\nhint: step the same optimizers on all ranks"
            )
    return tuple(merged.values())


def with_layout(tensor: HomeTensor, piece: torch.Tensor | None, target: Annotation, table: GroupTable) -> None:
    """Give a home tensor, which stays the same object, another layout and this rank's part under it (None: empty)."""
    layout = home_layout(target, tuple(tensor.shape), table.rank, table.size)
    tensor.data = HomeTensor(tensor.local.new_empty(layout.local_shape) if piece is None else piece, layout)


def _digest(tensors: tuple[StateTensor, ...]) -> int:
    """Hash descriptions to 48 bits, the same in every process."""
    return hash_text(repr(tensors))


def _kind(number: int, path: Sequence[Any]) -> str:
    """Name an optimizer's tensor: `optimizer 0 exp_avg`; deeper ones by all keys on the way."""
    keys = [str(getattr(step, "key", getattr(step, "idx", step))) for step in path]
    return f"optimizer {number} {_INSIDE.join(keys)}"


def _place(kind: str) -> tuple[int, str]:
    _, number, key = kind.split(" ", 2)
    if _INSIDE in key:
        raise StateError(f"this rank lacks {kind!r}, which other ranks keep inside a list or mapping of their state")
    return int(number), key
