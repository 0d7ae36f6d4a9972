"""Which modules of a LightningModule run in parallel: those that its training step calls.

A step calls the LightningModule itself (`self(x)`), a module in it (`self.model(x)`), or several. Nobody knows which
before the first step, nor with what. So while a step runs, modules that are trained wait for their first call, and the
outermost that is called is made parallel there, with what it is called with as the example.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hetu_fx.errors import BatchError, StateError

Make = Callable[[nn.Module, Mapping[str, Any] | tuple[Any, ...]], None]


class Parts:
    """The modules of a model that run in parallel.

    Args:
        model: has them in it, or is one itself.
        make: makes a module parallel; called with it and an example of its batch.
    """

    def __init__(self, model: nn.Module, make: Make) -> None:
        self.model = model
        self._make = make
        self._waiting: list[nn.Module] = []

    @property
    def parallel(self) -> tuple[nn.Module, ...]:
        """Return the modules that run in parallel by now."""
        return tuple(module for module in self.model.modules() if "hetu" in vars(module))

    def outside(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters of no module that runs in parallel."""
        inside = {id(parameter) for module in self.parallel for parameter in module.parameters()}
        return tuple(parameter for parameter in self.model.parameters() if id(parameter) not in inside)

    @contextmanager
    def found_by_calls(self) -> Iterator[None]:
        """Make parallel what is called first inside a with block, and is trained."""
        self._wait()
        try:
            yield
        finally:
            self._wait_no_more()

    def _wait(self) -> None:
        self._waiting = [module for module in self._candidates() if "forward" not in vars(module)]
        for module in self._waiting:
            object.__setattr__(module, "forward", self._first_call_of(module))

    def _wait_no_more(self) -> None:
        for module in self._waiting:
            del module.__dict__["forward"]
        self._waiting = []

    def _candidates(self) -> Iterator[nn.Module]:
        """Yield the modules that are trained, and neither run in parallel, nor hold or are in one that does."""
        inside = {part for module in self.parallel for part in module.modules()}
        for module in self.model.modules():
            if inside.isdisjoint(module.modules()) and any(p.requires_grad for p in module.parameters()):
                yield module

    def _first_call_of(self, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._wait_no_more()
            self._check_unshared(module)
            self._make(module, _example(module, args, kwargs))
            self._wait()
            return module.forward(*args, **kwargs)

        uncompiled: Callable[..., Any] = torch.compiler.disable(forward)
        return uncompiled

    def _check_unshared(self, module: nn.Module) -> None:
        """Refuse a module with a parameter of one that runs in parallel by itself.

        Raises:
            StateError: names both.
        """
        own = {id(parameter): name for name, parameter in module.named_parameters()}
        names = {part: name or "the LightningModule" for name, part in self.model.named_modules()}
        for other in self.parallel:
            for parameter in other.parameters():
                if id(parameter) in own:
                    raise StateError(
                        f"training_step calls {names[module]!r}, which shares parameter {own[id(parameter)]!r} with "
                        f"{names[other]!r}, which runs in parallel by itself\n"
                        f"hint: have training_step call one module that calls both, such as the LightningModule by "
                        f"self(...)"
                    )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients where they are made, until the first backward outside."""
        with ExitStack() as stack:
            for module in self.parallel:
                stack.enter_context(module.no_sync())  # type: ignore[operator]
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make all modules plain ones, with whole parameters, inside a with block; collective."""
        with ExitStack() as stack:
            for module in self.parallel:
                stack.enter_context(module.hetu.whole())  # type: ignore[operator, union-attr]
            yield


def _example(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any] | tuple[Any, ...]:
    """Return what a module is called with, as `hetu_fx.auto_parallelize` takes it."""
    if not kwargs:
        return args
    if not args:
        return kwargs
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs).arguments
    kinds = {signature.parameters[name].kind: name for name in bound}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        raise BatchError(
            f"{type(module).__name__} takes *{kinds[inspect.Parameter.VAR_POSITIONAL]}, and training_step calls it "
            f"with arguments by position and by keyword ({', '.join(kwargs)})\nhint: pass all of them by position"
        )
    more = bound.pop(kinds.get(inspect.Parameter.VAR_KEYWORD, ""), {})
    return {**bound, **more}
