"""What cannot be captured: refused while it is traced, or explained where torch.export failed; with the user's line.

A graph has only the forward of a function with a backward of its own, and differentiates that. Where the backward says
something else (a straight-through estimator: the forward rounds, the backward passes on) the graph would have other
gradients; whether it does is tried on random numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from hetu_fx.base import torch_private
from hetu_fx.base.dtypes import as_reals, carries_gradient, in_double
from hetu_fx.base.torch_private import is_fake, is_setup_context_defined, is_told_by_values, tree_leaves
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.tracing.derivatives import Derivatives, DerivativeTaken
from hetu_fx.graph.tracing.meanings import Meaning, explain_trace_error

EAGER = (
    'use hetu_fx.auto_parallelize(..., capture="eager"), which runs the module as it is, data parallel with uneven '
    "shares"
)
INTO_A_MODULE = "move it into the forward of a module of its own, which becomes a leaf (see hetu_fx.leaf)"
WAY_OUT = f"rewrite the line, or {EAGER}"
SAID_AT = "The following call raised this error:"

Function = type[torch.autograd.Function]
STEP = 1e-6  # along a random direction, in float64
TOLERANCE = 1e-7
_ROUNDING = 1e-15  # of a result, which a quotient of differences makes larger
_DRAWS = ((None, 1.0), (1.0, 1e-3), (30.0, 1e3), (1e3, 1.0))
"""On which numbers a function is tried (None: within 0.2 and 0.8), and how large the gradients are that it is given."""
MOST_ELEMENTS = 2**24  # of all arguments of a function that is tried


def explain_failure(error: Exception) -> CaptureError:
    """Make the error that the user sees of one that torch.export raised."""
    line, meaning = user_line(error), explain_trace_error(error)
    if meaning is not None:
        return refusal(line, meaning)
    return CaptureError(f"cannot capture the model at {line}: {reason(error)}\nhint: {INTO_A_MODULE}, {WAY_OUT}")


def user_line(error: BaseException) -> str:
    """Return "file.py:41" of the user's innermost line that an error of a trace comes from."""
    return _line_in_message(str(error)) or _line_in_traceback(error.__traceback__) or "unknown line"


def refusal(line: str, meaning: Meaning) -> CaptureError:
    """Make the error that the user sees where a line does what no graph has."""
    cure = f"{meaning.cure}, {INTO_A_MODULE}, or {EAGER}"
    return CaptureError(f"cannot capture the model at {line}: {meaning.words}\nhint: {cure}")


@contextlib.contextmanager
def watch_fixed_sizes() -> Iterator[list[str]]:
    """Collect "file.py:41" of every line at which a trace inside the context fixes a dynamic size.

    torch.export says which size was fixed, and not where; so this looks at the stack when it happens. If
    torch changes this inner function, the lines are left out and nothing else changes.
    """
    lines: list[str] = []

    def note(_: Any, value: Any) -> None:
        line = _line_in_frames(traceback.extract_stack())
        if value.is_number and line is not None:
            lines.append(line)

    with torch_private.watching_sizes(note):
        yield lines


class RowCountError(CaptureError):
    """A forward goes on by how many values are of some kind, and takes that for the number of rows."""


@contextlib.contextmanager
def refusing_counted_rows() -> Iterator[None]:
    """Refuse what makes a number that values tell (`x[mask]`) another size, at the line that does.

    Raises:
        RowsAreCounted: there is such a line.
    """

    def see(symbol: Any, value: Any) -> None:
        others = getattr(value, "free_symbols", ())
        if is_told_by_values(symbol) and any(not is_told_by_values(other) for other in others):
            raise RowCountError("it takes how many values are of some kind for a size that it knows, as the rows")

    with torch_private.watching_sizes(see):
        yield


def _line_of_caller() -> str:
    """Return "file.py:41" of the user's innermost line that is running."""
    return _line_in_frames(traceback.extract_stack()) or "unknown line"


def user_frame() -> tuple[str, str]:
    """Return "file.py:41" of the user's innermost line that is running, and what that line says."""
    frame = next(reversed(_outside(traceback.extract_stack())), None)
    return ("unknown line", "") if frame is None else (_short(frame.filename, frame.lineno or 0), frame.line or "")


def reason(error: Exception) -> str:
    """Return the kind of an error and the first line of what it says; of torch's words about traces, what they mean."""
    meaning = explain_trace_error(error)
    if meaning is not None:
        return meaning.words
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}".rstrip(".")


def is_caught_by_the_user(error: Exception) -> bool:
    """Tell whether an error that was raised and caught came up to code of the user's or of a library."""
    return _line_in_traceback(error.__traceback__) is not None


def _line_in_message(message: str) -> str | None:
    frame = meta.innermost_frame(message.partition(SAID_AT)[2])
    return _short(*frame) if frame else None


def _line_in_traceback(trace: TracebackType | None) -> str | None:
    return _line_in_frames(traceback.extract_tb(trace))


def _line_in_frames(frames: traceback.StackSummary) -> str | None:
    outside = _outside(frames)
    return _short(outside[-1].filename, outside[-1].lineno or 0) if outside else None


def _outside(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    hidden = (*meta.NOT_THE_USERS, contextlib.__file__, torch_private.__file__)
    return [frame for frame in frames if not frame.filename.startswith(hidden)]


def _short(path: str, line: int) -> str:
    return f"{os.path.basename(path)}:{line}"


class NothingUnseen(TorchFunctionMode):
    """Refuses calls of which a graph says nothing, though gradients depend on them.

    Args:
        derivatives: lets the trace see those that the forward takes; None: it does not.

    Attributes:
        asks_layout: the line at which the user's code asks how a tensor lies in memory; empty if it does not.
    """

    def __init__(self, derivatives: Derivatives | None = None) -> None:
        super().__init__()
        self.derivatives = derivatives
        self.asks_layout = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, nn.Parameter) and argument.requires_grad and not is_fake(argument):
                raise CaptureError(
                    f"a trainable tensor of shape {tuple(argument.shape)} is used that is not a parameter of the "
                    "model\nhint: register it in the model (a loss function with parameters belongs into the model)"
                )
        if func is torch.autograd.grad:
            if self.derivatives is None:
                raise DerivativeTaken
            return self.derivatives.taken(args, kwargs or {})
        if (meaning := _REFUSED.get(func)) is not None and (func not in _RENORMALIZE or (kwargs or {}).get("max_norm")):
            raise refusal(_line_of_caller(), meaning)
        if func in _HOOKS:
            raise CaptureError(
                f"forward registers a hook on a value ({_line_of_caller()}), and a captured graph has none\n"
                f"hint: write what it does to the gradient as an op (half of it: `0.5 * h + 0.5 * h.detach()`), or "
                f"{WAY_OUT}"
            )
        if func in _FREEZING and isinstance(args[0], nn.Parameter):
            wanted = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
            if bool(wanted) != args[0].requires_grad:
                raise CaptureError(
                    f"forward sets requires_grad of a parameter to {wanted} ({_line_of_caller()}), and a graph trains "
                    f"what is trained before it\nhint: set it outside, use `weight.detach()`, or {WAY_OUT}"
                )
        if func == _DATA:
            return args[0].detach()  # which a trace sees
        if func == _SETS_DATA and isinstance(args[0], nn.Parameter):
            return self._keep_data(*args)
        if func in _LAYOUTS and not sys._getframe(1).f_code.co_filename.startswith(meta.NOT_THE_USERS):
            self.asks_layout = self.asks_layout or _line_of_caller()
        return func(*args, **(kwargs or {}))

    def _keep_data(self, parameter: nn.Parameter, data: Tensor) -> None:
        """Let a parameter have its own memory again, as a cast to its own dtype gives it; refuse any other."""
        same = meta.example_storages(parameter) == meta.example_storages(data) and parameter.stride() == data.stride()
        if not same or (parameter.shape, parameter.dtype) != (data.shape, data.dtype):
            raise CaptureError(
                f"forward gives a parameter of shape {tuple(parameter.shape)} and {parameter.dtype} other data "
                f"({_line_of_caller()}), and a graph reads what is there before it\nhint: do so outside, or {WAY_OUT}"
            )


_DATA, _SETS_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_RENORMALIZE = (functional.embedding, functional.embedding_bag)  # where they are given a norm
_REFUSED: Mapping[Any, Meaning] = {
    **dict.fromkeys(
        _RENORMALIZE,
        Meaning(
            "it normalizes rows of an embedding's weight in place (max_norm), and a graph writes to no parameter",
            "leave max_norm out, and scale what is looked up: "
            "rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)",
        ),
    ),
    torch_private.pack_padded_sequence: Meaning(
        "it packs sequences by their lengths (pack_padded_sequence), and a graph has no sizes that values tell",
        "give the recurrent layer the padded sequences, and take the last step of each by its length (output.gather); "
        "steps after that change nothing before it, unless the layer is bidirectional",
    ),
    Tensor.backward: Meaning(
        "it calls backward(), which leaves gradients in tensors, and a graph makes values only",
        "take them by torch.autograd.grad(..., create_graph=True)",
    ),
}
"""Functions that no graph can have, with what a forward does that calls them."""
_LAYOUTS = (Tensor.is_contiguous, Tensor.stride)
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_FREEZING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


@contextlib.contextmanager
def no_backward_is_lost() -> Iterator[None]:
    """Refuse functions whose backward is not the derivative of their forward, which is all that a trace has of them."""
    found = inspect.getattr_static(torch.autograd.Function, "apply")  # of Python, or of C as in torch 2.14

    def checked(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        carries = any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)
        if carries and issubclass(cls, CheckpointFunction):
            run_function, _, *given = args  # what its backward computes again, and differentiates
            return run_function(*given)
        if carries and not cls.__module__.startswith("torch.") and not is_derivative(cls, args):
            raise CaptureError(
                f"the model calls {cls.__qualname__} ({_line_of_caller()}), an autograd function whose backward is not "
                f"the derivative of its forward (tried on random numbers), and a captured graph has its forward "
                f"only\nhint: {INTO_A_MODULE}, {WAY_OUT}"
            )
        return found.__get__(None, cls)(*args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(checked)):
        yield


@contextlib.contextmanager
def inference_is_no_grad() -> Iterator[None]:
    """Let inference mode be a region without gradients, which a trace sees; it does not see inference mode."""
    regions: list[torch.set_grad_enabled] = []

    def enter(mode: torch.inference_mode) -> None:
        regions.append(torch.set_grad_enabled(not mode.mode))

    def leave(mode: torch.inference_mode, *error: Any) -> None:
        regions.pop().__exit__(*error)

    with mock.patch.multiple(torch.inference_mode, __enter__=enter, __exit__=leave):
        yield


def is_derivative(function: Function, arguments: Sequence[Any]) -> bool:
    """Tell whether a function's backward is the derivative of its forward, along random directions.

    It is called on random numbers in the shapes of `arguments`, which may be fake tensors: on small positive ones, and
    on others of both signs and several sizes as far as it takes them. False also where that cannot be found out: the
    function fails on the first, or they are very large.
    """
    with ThreadPoolExecutor(1) as elsewhere:  # a thread of its own is in none of the modes of a trace
        try:
            return elsewhere.submit(_agrees, function, arguments).result()
        except Exception:  # whatever a user's function raises on numbers that it was not meant for
            return False


class _Context:
    """What a forward leaves for its backward."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.needs_input_grad = tuple(_is_float(argument) for argument in arguments)
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("mark_", "set_", "save_")):
            return lambda *given: None
        raise AttributeError(name)


def _agrees(function: Function, arguments: Sequence[Any]) -> bool:
    if sum(argument.numel() for argument in arguments if isinstance(argument, Tensor)) > MOST_ELEMENTS:
        return False
    generator = torch.Generator().manual_seed(0)
    (first, weight), *others = _DRAWS
    if not _agrees_on([_numbers(argument, generator, first) for argument in arguments], function, generator, weight):
        return False
    for scale, weight in others:
        given = [_numbers(argument, generator, scale) for argument in arguments]
        with contextlib.suppress(Exception):  # it may take no such numbers, and then is not run on them
            if _agrees_on(given, function, generator, weight) is False:
                return False
    return True


def _agrees_on(given: Sequence[Any], function: Function, generator: torch.Generator, weight: float) -> bool | None:
    """Tell whether it does so for some arguments; None where it gives no numbers for them."""
    ways = [torch.randn(x.shape, generator=generator, dtype=x.dtype) if _is_float(x) else None for x in given]
    context = _Context(given)
    results = _forward(function, context, given)
    drawn = (torch.randn(y.shape, generator=generator, dtype=y.dtype) if _is_float(y) else y for y in results)
    weights = [weight * w if _is_float(w) else w for w in drawn]
    gradients = _listed(function.backward(context, *weights))
    expected = sum(_product(g, v) for g, v in zip(gradients, ways, strict=True))
    ahead, behind = (_forward(function, _Context(given), _moved(given, ways, h)) for h in (STEP, -STEP))
    floats = [(w, a, b) for w, a, b in zip(weights, ahead, behind, strict=True) if _is_float(a)]
    found = sum(_product(w, a - b) / (2 * STEP) for w, a, b in floats)
    rounding = sum(_product(w.abs(), a.abs()) for w, a, _ in floats) * _ROUNDING / STEP
    if not math.isfinite(found + rounding):
        return None
    return abs(found - expected) <= TOLERANCE * max(abs(found), abs(expected)) + rounding


def _product(gradient: Tensor | None, way: Tensor | None) -> float:
    """Return by how much a loss grows along a way, as gradients of real and complex numbers mean it."""
    if gradient is None or way is None:
        return 0.0
    return float((as_reals(gradient) * as_reals(way)).sum())


def _forward(function: Function, context: _Context, given: Sequence[Any]) -> list[Any]:
    if not is_setup_context_defined(function):
        return _listed(function.forward(context, *given))
    output = function.forward(*given)
    function.setup_context(context, tuple(given), output)
    return _listed(output)


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and carries_gradient(value.dtype)


def _numbers(argument: Any, generator: torch.Generator, scale: float | None) -> Any:
    """Return random numbers in the shape of a tensor, ones for integers; what is no tensor as it is."""
    if not isinstance(argument, Tensor):
        return argument
    shape = [meta.hint(size) for size in argument.shape]
    if not _is_float(argument):
        return torch.ones(shape, dtype=argument.dtype)
    dtype = in_double(argument.dtype)
    if scale is None:
        return torch.rand(shape, generator=generator, dtype=dtype) * 0.6 + 0.2
    return torch.randn(shape, generator=generator, dtype=dtype) * scale


def _moved(given: Sequence[Any], ways: Sequence[Tensor | None], step: float) -> list[Any]:
    return [x if way is None else x + step * way for x, way in zip(given, ways, strict=True)]
