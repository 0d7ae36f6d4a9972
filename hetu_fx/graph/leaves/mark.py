"""What may be a leaf: modules that the user says are, and what runs around the line that a trace refuses."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

from hetu_fx.errors import CaptureError

L = TypeVar("L", nn.Module, type[nn.Module])

_MARK = "_hetu_fx_leaf"
_FORWARD = "forward"
_OF_TRACES = ("hetu_fx.graph.", "torch.export", "torch._export")
"""How names of packages begin whose modules are around the user's in a trace."""


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


def is_marked_leaf(module: nn.Module) -> bool:
    """Tell whether the user has said that a module is a leaf."""
    return bool(vars(module).get(_MARK, False)) or any(vars(kind).get(_MARK, False) for kind in type(module).__mro__)


def leaf_modules(model: nn.Module, loss_fn: Any, given: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules of a model and of what makes its loss that are marked or given, once, with names."""
    seen = set[int]()
    roots = [("", model), *((f"loss_fn.{type(one).__name__}", one) for one in named_modules_of(loss_fn))]
    for prefix, root in roots:
        for name, module in root.named_modules():
            if id(module) not in seen and (module in given or is_marked_leaf(module)):
                seen.update(map(id, module.modules()))
                yield ".".join(part for part in (prefix, name) if part), module


def named_modules_of(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that a function names: itself, what it is bound to, given, or finds around it."""
    match function:
        case nn.Module():
            yield function
        case MethodType():
            yield from named_modules_of(function.__self__)
        case partial():
            for item in (function.func, *function.args, *function.keywords.values()):
                yield from named_modules_of(item)
        case FunctionType():
            yield from (item for item in _around(function) if isinstance(item, nn.Module))


def _around(function: FunctionType) -> Iterator[Any]:
    """Yield what a function names of globals, and of what is around it; not what has no value yet."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)


@dataclass(frozen=True, eq=False)
class Candidate:
    """What could be called as it is: a module, or the function that makes the loss; and its name in the model."""

    path: str
    called: Any


def leaf_candidates(error: BaseException, model: nn.Module, root: CodeType, loss: CodeType) -> list[Candidate]:
    """Return what runs around the line from which an error of a trace comes, innermost first; never the whole model.

    Args:
        error: of the trace; it may come from another one.
        model: what is traced.
        root: the code that calls the model.
        loss: the code that calls the loss function, as its first argument.
    """
    paths = {id(vars(module)): (path, module) for path, module in model.named_modules()}
    for one in _chain(error):
        frames = _frames(one)
        # An error that somebody keeps, and raises again, has frames of several traces, the last one's first.
        inside = [number for number, frame in enumerate(frames) if frame.f_code is root]
        if inside:
            own = frames[inside[0] + 1 : inside[1] if len(inside) > 1 else None]
            return list(_candidates(own, paths, loss))[::-1]
    return []


def _candidates(frames: Sequence[FrameType], paths: Any, loss: CodeType) -> Iterator[Candidate]:
    seen = set[int]()
    for frame in frames:
        if frame.f_code is loss:
            yield Candidate("loss_fn", frame.f_locals["function"])
        first = frame.f_code.co_varnames[:1] if frame.f_code.co_name == _FORWARD else ()
        found = frame.f_locals.get(*first) if first else None
        if isinstance(found, nn.Module) and not type(found).__module__.startswith(_OF_TRACES):
            # A trace has stand-ins of modules, with the attributes of what they stand for.
            path, module = paths.get(id(vars(found)), (f"loss_fn.{type(found).__name__}", found))
            if path and id(module) not in seen:
                seen.add(id(module))
                yield Candidate(path, module)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it comes from, the first cause first."""
    found = list[BaseException]()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and one not in found:
            found.append(one)
            left += [one.__context__, one.__cause__]
    yield from reversed(found)


def _frames(error: BaseException) -> list[FrameType]:
    found, trace = list[FrameType](), error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return found
