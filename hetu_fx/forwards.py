"""The `forward` of a parallel model: ours, which runs it in parallel, and what a script puts in its place later.

A script's forward that leads to ours (autocast around it, a log of its outputs) runs as it is, as ours runs inside it.
Any other is what the model computes from then on: ours takes its place, and has it captured.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn

from hetu_fx.base.patches import substitute_of
from hetu_fx.base.torch_private import CALL
from hetu_fx.copies import RestoreOriginal
from hetu_fx.errors import StateError
from hetu_fx.program.structure import told_hook
from hetu_fx.switching.runtime import Runtime

_DEEPEST = 12  # wrappers, and what they consist of, around each other
_LIBRARIES = ("torch", "hetu_fx")  # whose functions name nothing of a script's
_HINT = (
    "hint: assign it to the model's class, or before hetu_fx.auto_parallelize. A wrapper must keep the forward that it "
    "finds in the model, and call it"
)


class Forwards:
    """Puts ours in a model's `forward`, and looks at each call whether it still is there.

    Args:
        model: the user's, which has its own forward.
        runtime: runs it.
        plain: is told of another forward, as copies have it too.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, plain: RestoreOriginal) -> None:
        self.model, self.runtime, self.plain = model, runtime, plain
        self._ours: list[Callable[..., Any]] = []
        self._found: Callable[..., Any] | None = None
        self._is_wrapped = self._is_running = False
        self._runs = 0
        self._put(vars(model).get("forward"))
        # `nn.Module.__call__` finds it as an attribute, as it finds `forward`.
        object.__setattr__(model, CALL, torch.compiler.disable(self._call))

    def look(self) -> None:
        """Take in what a script has put in the place of the forward that was there.

        Raises:
            StateError: it has no signature.
        """
        found = vars(self.model).get("forward")
        if found is self._found:
            return
        make = substitute_of(found)
        if make is not None:
            found = make(cast(FunctionType, getattr(found, "__func__", found)))
            object.__setattr__(self.model, "forward", found)
        if self._leads_to_ours(found):
            self._found = found
            self._is_wrapped = getattr(found, "__func__", found) not in self._ours
        else:
            self._put(found)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.look()
        runs = self._runs
        made = getattr(type(self.model), CALL)(self.model, *args, **kwargs)
        if self._is_wrapped and self._runs == runs:
            raise StateError(
                f"{_told(self._found)} was put in the parallel model's 'forward' and taken for a wrapper of the one "
                f"before, but has not called it: nothing ran in parallel\n{_HINT}"
            )
        return made

    def _put(self, own: Callable[..., Any] | None) -> None:
        """Put ours in the model, for the forward that a script has put there (None: its class's)."""
        original = own or MethodType(type(self.model).forward, self.model)
        signature = _signature(original)
        run = torch.compiler.disable(self._run)  # torch.compile around the model would trace the runtime

        @functools.wraps(original)
        def forward(_: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return run(own, args, kwargs)

        # A method, without a trail to the original: what others wrap it in they can take off, and find this below.
        del forward.__dict__["__wrapped__"]
        forward.__signature__ = _as_method(signature)  # type: ignore[attr-defined]
        self._ours.append(forward)
        self._is_wrapped = False
        self._found = MethodType(forward, self.model)
        object.__setattr__(self.model, "forward", self._found)
        self.plain.has("forward", own)

    def _run(self, own: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._is_running and not self.runtime.whole.is_open:
            raise StateError(f"{_told(self._found)} calls the parallel model inside its own forward\n{_HINT}")
        self._runs += 1
        self.runtime.execution.become(own)
        self._is_running = True
        try:
            return self.runtime.run(args, kwargs)
        finally:
            self._is_running = False

    def _leads_to_ours(self, found: Any) -> bool:
        """Tell whether ours is among what a function refers to, and what these refer to."""
        seen, level = dict[int, Any](), [found]
        for _ in range(_DEEPEST):
            if any(value is ours for value in level for ours in self._ours):
                return True
            seen.update((id(value), value) for value in level)
            level = [value for value in chain(*map(self._referred, level)) if id(value) not in seen]
        return False

    def _referred(self, value: Any) -> Iterator[Any]:
        match value:
            case FunctionType():
                yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
                yield from vars(value).values()
                yield from value.__defaults__ or ()
                if str(value.__globals__.get("__name__")).partition(".")[0] not in _LIBRARIES:
                    for space in (value.__globals__, vars(self.model)):
                        yield from (space[name] for name in value.__code__.co_names if name in space)
            case MethodType():
                yield from (value.__func__, value.__self__)
            case functools.partial():
                yield from (value.func, *value.args, *value.keywords.values())
            case list() | tuple():
                yield from value
            case dict():
                yield from value.values()
            case nn.Module() | type() | ModuleType() | torch.Tensor():
                return
            case _:
                yield from getattr(value, "__dict__", {}).values()
                yield vars(type(value)).get("__call__")  # which may refer to more


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _told(forward: Any) -> str:
    return told_hook(getattr(forward, "__func__", forward))


def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{_told(forward)} was put in the parallel model's 'forward', but has no signature that Python can read\n"
            f"hint: put a function there that names its arguments"
        ) from error


def _as_method(bound: inspect.Signature) -> inspect.Signature:
    """Return the signature that a function must have to show this one once it is bound."""
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return bound.replace(parameters=[itself, *bound.parameters.values()])
