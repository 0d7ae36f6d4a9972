"""What the user says is a leaf: a module, or all modules of a class."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

from hetu_fx.errors import CaptureError

L = TypeVar("L", nn.Module, type[nn.Module])

_MARK = "_hetu_fx_leaf"


def leaf(module_or_class: L) -> L:
    """Say that a module, or every module of a class, is called as it is: no capture goes into it. Return it.

    Each call of it is one op of the captured graph, which reads the rows of the whole batch: they are gathered, every
    replica calls the module, and its own autograd gives the gradients. All else of the model is parallel as ever. The
    forward is run twice in a step, as its backward calls it again. May be a decorator of a class. Say so before
    `hetu_fx.auto_parallelize`.

    Args:
        module_or_class: the module, or the class, whose subclasses are leaves, too.

    Raises:
        CaptureError: it is no module and no class of modules.
    """
    kind = module_or_class if isinstance(module_or_class, type) else type(module_or_class)
    if not issubclass(kind, nn.Module):
        raise CaptureError(
            f"hetu_fx.leaf is for a module or a class of modules, not for {module_or_class!r}\n"
            "hint: put what the function does into the forward of an nn.Module, and name that"
        )
    if isinstance(module_or_class, type):
        setattr(module_or_class, _MARK, True)
    else:
        module_or_class.__dict__[_MARK] = True  # not by setattr, which some classes of modules refuse
    return module_or_class


def is_marked(module: nn.Module) -> bool:
    """Tell whether the user has said that a module is a leaf."""
    return bool(vars(module).get(_MARK, False)) or any(vars(kind).get(_MARK, False) for kind in type(module).__mro__)


def leaf_modules(model: nn.Module, loss_fn: Any, given: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules of a model and of what makes its loss that are marked or given, once, with names."""
    seen = set[int]()
    roots = [("", model), *((f"loss_fn.{type(one).__name__}", one) for one in modules_of(loss_fn))]
    for prefix, root in roots:
        for name, module in root.named_modules():
            if id(module) not in seen and (module in given or is_marked(module)):
                seen.update(map(id, module.modules()))
                yield ".".join(part for part in (prefix, name) if part), module


def modules_of(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function names: itself, what it is bound to, given, or finds around it."""
    match function:
        case nn.Module():
            yield function
        case MethodType():
            yield from modules_of(function.__self__)
        case partial():
            for item in (function.func, *function.args, *function.keywords.values()):
                yield from modules_of(item)
        case FunctionType():
            yield from (item for item in _around(function) if isinstance(item, nn.Module))


def _around(function: FunctionType) -> Iterator[Any]:
    """Yield what a function names of globals, and of what is around it; not what has no value yet."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)
