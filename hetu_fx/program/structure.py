"""What a model consists of at one time: its modules, their modes, what is in their slots, and hooks.

A captured graph holds for the structure that it was captured in. Before each step a comparison of identities, over
lists that were prepared once, tells whether anything has changed; only then the structure is worked out anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.base.torch_private import BACKWARD_HOOKS, FORWARD_HOOKS, SLOTS, make_tensor_guard

HOOKS = {**FORWARD_HOOKS, **BACKWARD_HOOKS}

_MOST_GUARDS = 4
_mode = itemgetter("training")
_traits = attrgetter("dtype", "requires_grad")
_END = object()


class Traits:
    """Dtypes and `requires_grad` of tensors, as they are when this is made.

    Asking each tensor takes 0.4 microseconds, for wrappers such as home tensors. So torch compares all in one call,
    which also says no where only what surrounds it has changed (autocast); then they are asked, and it is made anew.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple({id(tensor): tensor for tensor in tensors}.values())
        self._before = list(map(_traits, self._tensors))
        self._guards: list[Callable[[], bool]] = []

    def hold(self) -> bool:
        """Tell whether they are what they were."""
        if torch.is_grad_enabled():
            return self._hold()
        with torch.enable_grad():
            return self._hold()

    def _hold(self) -> bool:
        for guard in self._guards:
            if guard():
                return True
        if list(map(_traits, self._tensors)) != self._before:
            return False
        made = make_tensor_guard(self._tensors) if self._tensors else None
        if made is not None:
            self._guards = [made, *self._guards][:_MOST_GUARDS]
        return True


class Structure:
    """The modules of a model, as they are when this is made.

    Hooks of the model itself are left out: torch calls them around the whole step.

    Attributes:
        modules: by their first names.
        facts: what a graph depends on, by what it is of; the same on ranks that hold the same.
        digest: a short hash of the facts, without hooks and devices: what either does is seen in the graph.
        key: equal for structures for which one graph holds, as long as one of them is kept. A parameter may be another
            one of the same shape, as graphs read parameters by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        everyone = list(self.modules.values())
        self._everyone, self._types = everyone, list(map(type, everyone))
        # A module without a mode of its own (what torch.compile gives) has that of the one that it holds.
        self._spaces = [space for space in map(vars, everyone) if "training" in space]
        self._modes = list(map(_mode, self._spaces))
        kept = [getattr(module, kind) for module in everyone for kind in SLOTS]
        kept += [getattr(module, kind) for module in everyone[1:] for kind in HOOKS]
        self._empty = [held for held in kept if not held]
        self._filled = [*(held.values() for held in kept if held), (_END,)]
        self._held = list(chain.from_iterable(self._filled))
        self._traits = Traits(value for value in self._held if isinstance(value, nn.Parameter))
        self.facts: Mapping[str, str] = dict(self._facts())
        hooks = (hook for module in everyone[1:] for kind in HOOKS for hook in getattr(module, kind).values())
        self.digest = self._digest()
        self.key = (tuple(self.facts.items()), tuple(map(id, chain(everyone, self._types, hooks))))

    def holds(self) -> bool:
        """Tell whether modules, their types and modes, slots, hooks, and what is trained are the same as they were."""
        return (
            not any(self._empty)
            and all(map(is_, chain.from_iterable(self._filled), self._held))
            and self._traits.hold()
            and list(map(_mode, self._spaces)) == self._modes
            and list(map(type, self._everyone)) == self._types
        )

    def _digest(self) -> str:
        told = (what for what in self.facts if "hooks of" not in what and not what.startswith("device of "))
        lines = (f"{what}: {self.facts[what]}" for what in told)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]

    def _facts(self) -> Iterator[tuple[str, str]]:
        first: dict[int, str] = {}
        for name, module in self.modules.items():
            where = place(name)
            yield where, type_name(type(module))
            yield f"training of {where}", str(module.training)
            for kind in SLOTS[:2]:
                yield from _tensor_facts(name, getattr(module, kind), first)
            if name:
                for kind, what in HOOKS.items():
                    if hooks := getattr(module, kind):
                        yield f"{what}s of {where}", ", ".join(map(told_hook, hooks.values()))


def place(name: str) -> str:
    """Say which module is meant."""
    return f"module {name!r}" if name else "the model"


def type_name(kind: type) -> str:
    """Return a class's full name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def told_hook(hook: Any) -> str:
    """Name a hook: its function, and where that begins."""
    function = getattr(hook, "__func__", getattr(hook, "func", hook))
    name = getattr(function, "__qualname__", type(hook).__qualname__)
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})" if code else name


def _tensor_facts(prefix: str, slots: Mapping[str, Tensor | None], first: dict[int, str]) -> Iterable[tuple[str, str]]:
    """Yield what is in a module's slots; a tensor that has been seen already is told by its first name."""
    for key, tensor in slots.items():
        name = f"{prefix}.{key}" if prefix else key
        if tensor is None:
            yield repr(name), "None"
            continue
        known = first.setdefault(id(tensor), name)
        if known != name:
            yield repr(name), f"the same as {known!r}"
            continue
        kind = str(tensor.dtype).removeprefix("torch.")
        yield repr(name), f"{kind}{list(tensor.shape)}"
        yield f"device of {name!r}", tensor.device.type
        if isinstance(tensor, nn.Parameter):
            yield f"requires_grad of {name!r}", str(tensor.requires_grad)


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """Say which facts are unlike, and how."""
    return tuple(
        f"{what}: {before.get(what, 'none')} -> {after.get(what, 'none')}"
        for what in {**before, **after}
        if before.get(what) != after.get(what)
    )
