"""Which modules, and which loss function, run around the line that a trace refuses: what can be a leaf instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import nn

_FORWARD = "forward"
_OF_TRACES = ("hetu_fx.graph.", "torch.export", "torch._export")
"""How names of packages begin whose modules are around the user's in a trace."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """What could be called as it is: a module, or the function that makes the loss; and its name in the model."""

    path: str
    called: Any


def candidates_of(error: BaseException, model: nn.Module, root: CodeType, loss: CodeType) -> list[Candidate]:
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
