"""Give a model on the meta device the values of its own initialisation, a few modules at a time.

What initialises a module is its `reset_parameters`, and then the `_init_weights` of the nearest module around it that
has one, as models of transformers do; one that takes no module is the module's own. Each module draws from a stream of
its own, which follows from a seed and the module's name: values are the same under every plan and on any number of
ranks. Modules that write one tensor (a block that scales what its layer has drawn) are run together, in the order of
`nn.Module.apply`; a trial on the meta device shows which.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetu_fx.base.device_types import HOST
from hetu_fx.base.dtypes import is_real
from hetu_fx.base.torch_private import (
    RESETS,
    SLOTS,
    TorchDispatchMode,
    argument_names,
    buffer_slots,
    parameter_slots,
    storage_key,
    tree_leaves,
)
from hetu_fx.comm_ops.wire.consensus import hash_text
from hetu_fx.errors import StateError
from hetu_fx.graph.neutral import stand_in_state

META = torch.device("meta")
_OF_MODULES = "_init_weights"  # of a module, which takes one of its own submodules

Slots = dict[str, Any]


@dataclass(frozen=True)
class _Init:
    """What initialises one module, by the module's name."""

    path: str
    acts: tuple[Callable[[], object], ...]

    def run(self, seed: int) -> None:
        """Initialise it, with random numbers of its own."""
        number = hash_text(f"{seed} {self.path}")
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        try:
            for act in self.acts:
                act()
        except Exception as error:  # whatever the parts of a model raise
            raise StateError(
                f"module {self.path!r} cannot be initialised: {type(error).__name__}: {error}\nhint: give weights that "
                f"hold its parameters"
            ) from error


@dataclass(frozen=True)
class _Unit:
    """Modules that are initialised together, in this order, and the names of all that they write."""

    inits: tuple[_Init, ...]
    names: frozenset[str]


class OwnInit:
    """The initialisation of a model whose parameters have no values.

    Args:
        model: its parameters and buffers are not touched.
        seed: of all that is drawn.

    Attributes:
        units: that write parameters and buffers.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self._slots = _slots_by_name(model)
        self.units = tuple(self._units())

    def check(self, names: Iterable[str]) -> None:
        """Refuse tensors that nothing gives a value.

        Raises:
            StateError: names them, and the modules that they are of.
        """
        known = {name for unit in self.units for name in unit.names}
        if lost := [name for name in names if name not in known]:
            raise StateError(_lost_text(self.model, lost))

    def values(
        self, wanted: Collection[str], is_needed: Callable[[str], bool]
    ) -> Generator[tuple[str, Tensor], None, None]:
        """Yield (first name, value in host memory) of tensors; those of one unit are in memory at once.

        Args:
            wanted: names of parameters or buffers. Others are written without memory.
            is_needed: tells which of them are needed here: units without any are not run.

        Raises:
            StateError: a module leaves elements of a tensor without a value.
        """
        with _aside(self.model):
            for unit in self.units:
                own = sorted(unit.names.intersection(wanted))
                if any(map(is_needed, own)):
                    yield from self._run(unit, own).items()

    def _run(self, unit: _Unit, names: Collection[str]) -> dict[str, Tensor]:
        slots = {name: self._slots[name] for name in names}
        empty = {name: _stand_in(places[0][0][places[0][1]]) for name, places in slots.items()}
        before = {name: places[0][0][places[0][1]] for name, places in slots.items()}
        for name, places in slots.items():
            _put(places, empty[name])
        try:
            for init in unit.inits:
                init.run(self.seed)
            return {name: _checked(self.model, name, places[0][0][places[0][1]]) for name, places in slots.items()}
        finally:
            for name, places in slots.items():
                _put(places, before[name])

    def _units(self) -> Iterator[_Unit]:
        """Yield modules that write something in common, by a trial without memory."""
        groups: list[tuple[list[_Init], set[str]]] = []
        with _aside(self.model):
            for init in _inits(self.model):
                written = self._written(init)
                met = [group for group in groups if not group[1].isdisjoint(written)]
                if written:
                    groups = [group for group in groups if group not in met]
                    merged = [one for inits, _ in met for one in inits], {n for _, names in met for n in names}
                    groups.append(([*merged[0], init], merged[1] | written))
        for inits, names in groups:
            yield _Unit(tuple(inits), frozenset(names))

    def _written(self, init: _Init) -> set[str]:
        """Return the names of what a module's initialisation writes, or puts in the place of."""
        before = {name: places[0][0][places[0][1]] for name, places in self._slots.items()}
        by_storage = {storage_key(tensor.untyped_storage()): name for name, tensor in before.items()}
        with _Writes() as seen, _Asked(seen.storages):
            try:
                init.run(self.seed)
            except StateError:  # it reads numbers, which nothing has here: all inside the module may be written
                inside = self.model.get_submodule(init.path)
                tensors = (*inside.parameters(), *inside.buffers())
                seen.storages.update(storage_key(tensor.untyped_storage()) for tensor in tensors)
        written = {by_storage[key] for key in seen.storages if key in by_storage}
        for name, places in self._slots.items():
            if places[0][0][places[0][1]] is not before[name]:
                written.add(name)
                _put(places, before[name])
        return written


class _Writes(TorchDispatchMode):
    """Notes the storages of the tensors that ops write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if written := argument_names(func).written:
            given = dict(zip(argument_names(func).all, args, strict=False)) | kwargs
            values = tree_leaves([given[name] for name in written if name in given])
            self.storages.update(storage_key(one.untyped_storage()) for one in values if isinstance(one, Tensor))
        return func(*args, **kwargs)


class _Asked(TorchFunctionMode):
    """Notes the storages of tensors that are asked whether they have values: what fills them leaves others as they are.

    As `torch.nn.init.trunc_normal_` does.
    """

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            self._storages.add(storage_key(args[0].untyped_storage()))
        return func(*args, **(kwargs or {}))


@contextmanager
def _aside(model: nn.Module) -> Iterator[None]:
    """Let parameters and buffers stand aside for tensors without memory, and random numbers be as they were."""
    with (
        stand_in_state(model, lambda _: META, SLOTS[:2], anew=True),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        HOST,
    ):
        states = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _inits(model: nn.Module) -> Iterator[_Init]:
    """Yield what initialises each module, those inside of it first, as `nn.Module.apply` goes."""

    def inside(path: str, module: nn.Module, around: Callable[[nn.Module], object] | None) -> Iterator[_Init]:
        own = getattr(module, _OF_MODULES, None)
        takes = _num_taken(own) if callable(own) else -1
        if takes > 1:
            raise StateError(
                f"{_OF_MODULES} of {path or 'the model'} needs {takes} arguments, and weights='init' gives it a module "
                f"alone\nhint: give the others defaults, or give weights that hold the values"
            )
        around = own if takes == 1 else around
        for name, child in module.named_children():
            yield from inside(f"{path}.{name}" if path else name, child, around)
        resets = [getattr(module, name) for name in RESETS if callable(getattr(module, name, None))][:1]
        acts = (*resets, *([own] if takes == 0 else []), *([] if around is None else [partial(around, module)]))
        if acts and id(module) not in seen:
            seen.add(id(module))
            yield _Init(path, acts)

    seen: set[int] = set()
    return inside("", model, None)


def _num_taken(function: Callable[..., Any]) -> int:
    """Return how many arguments a function takes: of several, how many it must be given."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(parameters) if len(parameters) < 2 else len(needed)


def _slots_by_name(model: nn.Module) -> dict[str, list[tuple[Slots, str]]]:
    """Return where each parameter and buffer stands, all places of one that is shared, by its first name."""
    found: dict[str, list[tuple[Slots, str]]] = {}
    first: dict[int, str] = {}
    for path, module in model.named_modules():
        for slots in (parameter_slots(module), buffer_slots(module)):
            for name, tensor in slots.items():
                if tensor is not None:
                    known = first.setdefault(id(tensor), f"{path}.{name}" if path else name)
                    found.setdefault(known, []).append((slots, name))
    return found


def _put(places: Iterable[tuple[Slots, str]], tensor: Tensor) -> None:
    for slots, name in places:
        slots[name] = tensor


def _stand_in(like: Tensor) -> Tensor:
    """Return a tensor in host memory, of which it is seen whether it has been written: its real numbers are none."""
    empty = torch.empty(tuple(like.shape), dtype=like.dtype, device=HOST)
    made = empty.fill_(float("nan")) if _shows_nan(like.dtype) else empty.zero_()
    return nn.Parameter(made, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else made


def _shows_nan(dtype: torch.dtype) -> bool:
    return is_real(dtype) and dtype.itemsize > 1


def _checked(model: nn.Module, name: str, made: Tensor) -> Tensor:
    """Return a value without gradients; raises StateError where elements of it have none."""
    left = int(made.isnan().sum()) if _shows_nan(made.dtype) else 0
    if made.is_meta or left:
        raise StateError(_lost_text(model, [name], f" ({left} of {made.numel()} elements)" if left else ""))
    return made.detach()


def _lost_text(model: nn.Module, names: list[str], more: str = "") -> str:
    owner = model.get_submodule(names[0].rpartition(".")[0])
    shown = ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    kind = type(owner).__qualname__
    return (
        f"{shown} would have no value{more}: neither {kind}.{RESETS[0]} nor an {_OF_MODULES} around it gives one, and "
        f"no file was given that holds it\nhint: give weights that hold it, or a {RESETS[0]} to {kind}"
    )
