"""The parameters of a model, and what its optimizer has of them, as home tensors; and its buffers, whole everywhere.

Of a rank alone the parameters stay what they are: all of each is here, and nothing is to be said of where.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Duplicate
from hetu_fx.annotations.local import local_part, write_part
from hetu_fx.base.once import once
from hetu_fx.base.torch_private import (
    buffer_slots,
    gradient_hooks,
    set_gradient_hooks,
    version,
    without_weak_references,
)
from hetu_fx.comm_ops.plans.bsr_plan import BsrPlan, TensorMove, plan_moves
from hetu_fx.comm_ops.wire.bsr_run import run_moves
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.home.tensor import has_piece

MESSAGE_BYTES = 64 << 20
"""Of parameters that travel at once: what a rank needs besides the model and its own part, or one larger tensor."""

Key = TypeVar("Key")
Some = TypeVar("Some", bound=Tensor)


def move_home(model: nn.Module, layouts: Mapping[str, HomeLayout], table: GroupTable) -> dict[str, nn.Parameter]:
    """Replace every parameter by a home parameter that is the same object, so that optimizers keep working.

    The values are rank 0's, as under DistributedDataParallel; collective. What is a home parameter already (in a copy
    of a parallel model) stays as it is, and so do all of a rank alone. Returns the parameters by first name, in the
    model's order.
    """
    parameters = dict(model.named_parameters())
    left = {n: p for n, p in parameters.items() if not (isinstance(p, HomeTensor) and has_piece(p))}
    bring_home(model, left, layouts, table)
    return parameters


def bring_home(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, HomeLayout], table: GroupTable
) -> None:
    """Make home parameters of these of a model, as `move_home` does; collective.

    A few at a time: what a rank had whole of them is let go then. Ranks other than the first need have nothing but
    home tensors that wait for their pieces.
    """
    if table.size == 1:
        return
    with without_weak_references(model):
        for some in few_at_a_time(parameters):
            for name, piece in _pieces_of_first(some, layouts, table).items():
                _settle(name, some[name], piece, layouts[name])


def few_at_a_time(tensors: Mapping[Key, Some]) -> Iterator[dict[Key, Some]]:
    """Yield tensors together that take no more than a message, or one of them."""
    some: dict[Key, Some] = {}
    for key, tensor in tensors.items():
        if some and sum(one.numel() * one.itemsize for one in (*some.values(), tensor)) > MESSAGE_BYTES:
            yield some
            some = {}
        some[key] = tensor
    if some:
        yield some


def _settle(name: str, parameter: nn.Parameter, piece: Tensor, layout: HomeLayout) -> None:
    """Let a parameter be a home parameter with this piece; one that waits for it too, so that versions are alike."""
    gradient, parameter.grad = parameter.grad, None
    home = nn.Parameter(HomeTensor(piece, layout), requires_grad=parameter.requires_grad)
    swap_parameter(name, parameter, home)
    if gradient is not None:
        parameter.grad = HomeTensor.from_full(gradient, layout)


def swap_parameter(name: str, parameter: nn.Parameter, home: Tensor) -> None:
    """Let a parameter be another one, and that what the parameter was: both stay the same objects.

    Raises:
        StateError: something refers to it that would not follow.
    """
    if references := weakref.getweakrefs(parameter):
        raise StateError(
            f"parameter {name!r} cannot become a home parameter while {len(references)} weak references to it are "
            f"kept; call hetu_fx.auto_parallelize before what keeps them (such as a weakref.WeakKeyDictionary of "
            f"parameters)"
        )
    hooks = gradient_hooks(parameter)
    try:
        torch.utils.swap_tensors(parameter, home)
    except RuntimeError as error:
        raise StateError(
            f"parameter {name!r} cannot become a home parameter while a tensor that was computed from it is kept, as "
            f"torch.nn.utils.weight_norm does; use torch.nn.utils.parametrizations, or let go of the tensor ({error})"
        ) from error
    set_gradient_hooks(parameter, hooks)


def _pieces_of_first(
    parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, HomeLayout], table: GroupTable
) -> dict[str, torch.Tensor]:
    first = Annotation.on((0,))
    moves = [
        TensorMove(first, layouts[name].annotation, tuple(parameter.shape), parameter.element_size())
        for name, parameter in parameters.items()
    ]
    held = [parameter.detach() if table.rank == 0 else None for parameter in parameters.values()]
    like = [torch.empty(0, dtype=parameter.dtype, device=parameter.device) for parameter in parameters.values()]
    moved = run_moves(plan_moves(moves), held, table, like=like)
    return {
        name: empty.new_empty(layouts[name].local_shape) if piece is None else piece
        for name, empty, piece in zip(parameters, like, moved, strict=True)
    }


_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})  # of torch's optimizers: NAdam's and ASGD's beside the count


def cut_optimizer_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Cut whole state of home parameters, as a file of a plain optimizer holds it, into their homes; no communication.

    Every rank must have the same. A number that counts for the whole parameter is no such state, even where the
    parameter has no dims either. `parameters` are those of which it is; None: all that the optimizer has.
    """
    all_of_it = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for home in all_of_it if parameters is None else parameters:
        if not isinstance(home, HomeTensor):
            continue
        state = optimizer.state.get(home, {})
        for key, value in state.items():
            whole = isinstance(value, torch.Tensor) and not isinstance(value, HomeTensor)
            if whole and key not in _NUMBERS and value.shape == home.shape:
                state[key] = HomeTensor.from_full(value, home.home_layout)


def check_assigned_dtypes(model: nn.Module, tensors: Mapping[str, object]) -> None:
    """Refuse to take over other dtypes from a state dict, as `load_state_dict(..., assign=True)` is to do.

    Values and `requires_grad` are what else is taken over; copying does the same, and parameters stay in their homes.

    Raises:
        StateError: a tensor has another dtype than the parameter of its name.
    """
    for name, home in model.named_parameters(remove_duplicate=False):
        given = tensors.get(name)
        if isinstance(given, Tensor) and given.dtype != home.dtype:
            raise StateError(
                f"assign=True would make parameter {name!r} {given.dtype}, which is {home.dtype}; convert the parallel "
                f"model by model.to(dtype), or the state dict, and load it then"
            )


class Buffers:
    """Reads and writes parts of a model's buffers.

    A stage that updates a buffer (running statistics) writes the part it has; `sync` makes all ranks' copies equal
    again and is needed before another layout, or the user, reads them.
    """

    def __init__(self, model: nn.Module, table: GroupTable) -> None:
        self.model, self.table = model, table
        self._stale: dict[str, Annotation] = {}
        self._own_writes: dict[str, int] = {}
        self.look()

    def read(self, name: str, annotation: Annotation) -> Tensor:
        """Return this rank's part of a buffer under `annotation`."""
        return local_part(self.named(name), annotation, self.table.rank)

    def write(self, updates: Mapping[str, Tensor], annotations: Mapping[str, Annotation]) -> None:
        """Write new values of this rank's parts; `annotations` says for all ranks where each buffer's parts lie."""
        for name, value in updates.items():
            with self._writing(name) as buffer:
                write_part(buffer, value, annotations[name], self.table.rank)
        self._stale.update(annotations)

    def look(self) -> None:
        """Take the buffers that the model has now as those to count writes of."""
        self._counted = dict(self.model.named_buffers())

    def script_writes(self) -> dict[str, int]:
        """Return how often the script has written each buffer, where it can be told from writes of others."""
        own = self._own_writes
        return {name: version(buffer) - own.get(name, 0) for name, buffer in self._counted.items()}

    @contextmanager
    def _writing(self, name: str) -> Iterator[Tensor]:
        """Write a buffer otherwise than by the script."""
        buffer = self.named(name)
        before = version(buffer)
        yield buffer
        self._own_writes[name] = self._own_writes.get(name, 0) + version(buffer) - before

    def mark_written(self, names: Iterable[str], owners: Sequence[int]) -> None:
        """Remember buffers that ranks write for themselves; the values of `owners`, all alike, will count."""
        found = set(names)
        self._counted = {name: buffer for name, buffer in self._counted.items() if name not in found}
        self._let_count(found, owners)

    def _let_count(self, names: Iterable[str], owners: Sequence[int]) -> None:
        self._stale.update(dict.fromkeys(names, Annotation.replicated(owners)))

    def take_from_first(self, names: Sequence[str]) -> None:
        """Give all ranks the values that rank 0 has in these; collective. Buffers that are gone are forgotten.

        One that was computed from home tensors, and so is one (a mask that prunes), becomes a plain tensor first.
        """
        self._make_plain()
        there = {name for name, _ in self.model.named_buffers()}
        self._stale = {name: at for name, at in self._stale.items() if name in there}
        if names:
            self._let_count(names, (0,))
            self.sync()

    def _make_plain(self) -> None:
        known: dict[int, Tensor] = {}
        for module in self.model.modules():
            slots = buffer_slots(module)
            for name, buffer in slots.items():
                if isinstance(buffer, HomeTensor):
                    slots[name] = known.setdefault(id(buffer), buffer.full_tensor().detach().clone())

    @property
    def outdated(self) -> list[str]:
        """Return the names of the buffers that stages have written, and not all ranks have."""
        return sorted(name for name, annotation in self._stale.items() if not self._is_everywhere(name, annotation))

    def sync(self) -> None:
        """Bring every buffer that stages have written up to date on all ranks; collective."""
        names = self.outdated
        stale, self._stale = self._stale, {}
        if not names:
            return
        buffers = [self.named(name) for name in names]
        rank = self.table.rank
        parts = [
            local_part(buffer, stale[name], rank) if stale[name].holds(rank) else None
            for name, buffer in zip(names, buffers, strict=True)
        ]
        plan = self._plan(
            tuple((stale[name], tuple(b.shape), b.element_size()) for name, b in zip(names, buffers, strict=True))
        )
        moved = run_moves(plan, parts, self.table, like=buffers)
        for name, fresh in zip(names, moved, strict=True):
            if fresh is not None:
                with self._writing(name) as buffer:
                    buffer.copy_(fresh)

    def _is_everywhere(self, name: str, annotation: Annotation) -> bool:
        shape = tuple(self.named(name).shape)
        ranks = range(self.table.size)
        return all(annotation.holds(rank) and annotation.local_shape(rank, shape) == shape for rank in ranks)

    @once
    def _plan(self, written: tuple[tuple[Annotation, tuple[int, ...], int], ...]) -> BsrPlan:
        """Return how buffers come to all ranks from where they were written; the same in every step."""
        everyone = tuple(range(self.table.size))
        whole = Annotation.on(everyone, Duplicate(len(everyone)))
        return plan_moves([TensorMove(annotation, whole, shape, size) for annotation, shape, size in written])

    def named(self, name: str) -> Tensor:
        """Return the buffer of a name."""
        return self.model.get_buffer(name)
