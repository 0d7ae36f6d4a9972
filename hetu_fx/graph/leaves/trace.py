"""The leaves of one capture: modules whose forward, while it is traced, is an op.

What such an op makes is found out before there is one, by calls outside of the trace: a trace that meets a leaf for the
first time ends there, and is begun anew when that is known.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any, NoReturn, TypeVar

import sympy
import torch
from torch import Tensor, nn

from hetu_fx.base.device_types import HOST
from hetu_fx.base.torch_private import version
from hetu_fx.base.words import bytes_text
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.capture_failure import RowCountError, reason, user_line
from hetu_fx.graph.containers import Leaf, Opaque, TensorSlot, Tree, flatten, map_leaves, unflatten
from hetu_fx.graph.leaves.leaf_call import Holder, Invocation, OpaqueCall, know, told_tree
from hetu_fx.graph.leaves.leaf_ops import LEAF
from hetu_fx.graph.leaves.mark import Candidate, leaf_candidates, leaf_modules
from hetu_fx.graph.leaves.probe import CannotBeLeaf, FixedSizesError, LeafOperand, Question
from hetu_fx.graph.tracing.autocasts import Autocasts, ambient_autocasts
from hetu_fx.graph.tracing.contents import ABSENT, put

T = TypeVar("T")

MOST_LEAVES = 64
"""That are found in one model: each takes a trace up to where it is."""
_NUMBERS = re.compile(r"\d+")


class LeafWarning(UserWarning):
    """A module that no capture goes into is called as it is, on the rows of the whole batch."""


class LeafError(CaptureError):
    """A module that was to be a leaf cannot be one.

    Attributes:
        target: which.
    """

    def __init__(self, target: _Target, why: str) -> None:
        self.target, self.why = target, why
        super().__init__(
            f"{target.label} cannot be a leaf: {why}\nhint: rewrite it, or use "
            'hetu_fx.auto_parallelize(..., capture="eager"), which runs the module as it is, data parallel with uneven '
            "shares"
        )


class _UnknownLeaf(BaseException):
    """A trace has met a call of a leaf of which it is not known what it makes. No forward catches this."""

    def __init__(self, target: _Target, key: Any, question: Question) -> None:
        self.target, self.key, self.question = target, key, question


class _OfALeaf:
    """Stands in an attribute that a leaf leaves when it is called, which no graph has; says so when it is used."""

    def __init__(self, target: _Target, name: str) -> None:
        vars(self).update(_target=target, _name=name)

    def _use(self, *_: Any, **__: Any) -> NoReturn:
        why = f"the forward around it reads the attribute {self._name!r} that it leaves"  # type: ignore[attr-defined]
        raise LeafError(self._target, why)  # type: ignore[attr-defined]

    __getattr__ = __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = __index__ = _use
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _use
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __format__ = __torch_function__ = _use


@dataclass(frozen=True, eq=False)
class _Target:
    """What is called as it is.

    Attributes:
        path: its name in the model.
        called: the module, or the function that makes the loss.
        buffers: its buffers as they were before the trace, by name.
        why: the line that no graph has, and why; empty if the user has named it.
        around: what may be a leaf if it cannot.
        is_guessed: it is like one that was found, in another of the repeated blocks; if it cannot, nothing is to be.
        opens_rows: it is there so that batches may have any number of rows; a graph can be made of it for one.
        holder: calls it.
    """

    path: str
    called: Any
    buffers: Mapping[str, Tensor]
    why: str = ""
    around: Sequence[Candidate] = ()
    is_guessed: bool = False
    opens_rows: bool = False
    holder: Holder = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "holder", Holder(self.called))

    @classmethod
    def of(cls, path: str, called: Any, *how: Any) -> _Target:
        """Make one; before it is traced, as state has no values in a trace."""
        buffers = dict(called.named_buffers()) if isinstance(called, nn.Module) else {}
        return cls(path, called, {name: one.detach() for name, one in buffers.items()}, *how)

    @property
    def label(self) -> str:
        """Return what it is, for people."""
        called = self.called
        name = type(called).__name__ if isinstance(called, nn.Module) else getattr(called, "__qualname__", "")
        return f"{self.path} ({name or type(called).__qualname__})"

    @property
    def kind(self) -> tuple[type, str]:
        """Return what it has in common with those like it in repeated blocks."""
        return type(self.called), _NUMBERS.sub("#", self.path)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Return the modules that it consists of."""
        return tuple(self.called.modules()) if isinstance(self.called, nn.Module) else ()


class Leaves:
    """What is a leaf in one capture.

    Args:
        model: what is captured.
        loss_fn: what makes its loss.
        device: where the model is.
        codes: of the functions that call the model, and the loss function (see `leaf_candidates`).
        given: modules that are leaves besides those that the user has named; None: they are found.
        around: entered around calls outside of a trace, as around traces: what a forward leaves in Python is put back.

    Attributes:
        used: the calls that the last trace has made.
        opens_rows: whether something may become a leaf so that batches may have any number of rows.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        device: torch.device,
        codes: tuple[CodeType, CodeType],
        given: Collection[nn.Module] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._model, self._codes = model, codes
        self._device = HOST if device.type == "meta" else device
        self._finds, self._around = given is None, around
        self.opens_rows = self._finds
        self._targets = [_Target.of(path, module) for path, module in leaf_modules(model, loss_fn, given or ())]
        if any(not target.path for target in self._targets):
            raise CaptureError(
                "hetu_fx.leaf names the whole model, of which nothing would be parallel\n"
                'hint: name a part of it, or use hetu_fx.auto_parallelize(..., capture="eager")'
            )
        self._refused = set[int]()
        self._reasons = list[str]()
        self._known: dict[Any, OpaqueCall] = {}
        self._num_bytes: dict[str, int] = {}
        self._owner: dict[str, _Target] = {}
        self._inputs: Mapping[str, Tensor] | None = None
        self._autocasts: Autocasts = ()
        self._thread = threading.get_ident()
        self._hidden = list[tuple[dict[str, Any], str, Any]]()
        self._shared = list[tuple[_Target, Tensor, int]]()
        self._ambient: Autocasts = ()
        self.used: dict[str, OpaqueCall] = {}

    # While nothing is traced.

    def captured(self, capture: Callable[[], T]) -> T:
        """Return a capture, in which what it refuses is a leaf where that can be.

        Raises:
            CaptureError: no module around the line can be a leaf; or one that the user has named.
        """
        cause: CaptureError | None = None
        for _ in range(MOST_LEAVES):
            try:
                with self._patched():
                    return capture()
            except LeafError as refused:
                if cause is None or not refused.target.why:
                    raise
                found = self._instead_of(refused)
                if refused.target.is_guessed:
                    continue
            except CaptureError as error:
                cause, self._reasons = error, []
                found = self._found_by(error)
            if found is None and self._keeps_rows_fixed(cause):
                continue
            if found is None:
                raise self._told(cause) from cause.__cause__
            self._targets = [*self._not_inside(found), found, *self._like(found)]
        raise CaptureError(f"the model has more than {MOST_LEAVES} modules that cannot be captured") from cause

    def trace_with_answers(self, trace: Callable[[], T]) -> T:
        """Return a trace, begun anew whenever it has met a call of which it was not known what it makes.

        Raises:
            LeafRefused: no op can do what a leaf does.
            SizesAreFixed: a leaf takes no other sizes than the example's.
        """
        while True:
            try:
                return trace()
            except _UnknownLeaf as unknown:
                target, key, question = unknown.target, unknown.key, unknown.question
            try:
                with self._around():
                    call = replace(question, strange=self._not_of(target)).answer()
            except (CannotBeLeaf, FixedSizesError) as error:
                if isinstance(error, FixedSizesError) and not target.opens_rows:
                    raise
                raise LeafError(target, str(error)) from error
            know(call)
            self._known[key], self._owner[call.name] = call, target
            self._num_bytes[call.name] = question.num_bytes

    def warnings(self) -> Iterator[str]:
        """Say of what was found by itself what it costs, once for each."""
        kinds: dict[Any, list[str]] = {}
        for name in self.used:
            target = self._owner[name]
            if target.why:
                kinds.setdefault((*target.kind, target.why), []).append(name)
        for (*_, why), names in kinds.items():
            size = bytes_text(sum(self._num_bytes[name] for name in names))
            others = len({self._owner[name].path for name in names}) - 1
            like = f" (and {others} like it)" * bool(others)
            yield (
                f"{self._owner[names[0]].label} is a leaf{like}, as a graph cannot be made of it ({why}): it is called "
                "as it is, whole on each replica, once more for its backward; what it reads is gathered, "
                f"{size} of the example's rows\nhint: hetu_fx.leaf(module) says that this is meant"
            )

    def _found_by(self, error: CaptureError) -> _Target | None:
        """Return what to make a leaf as a capture was refused; None where nothing can be."""
        if not self._finds:
            return None
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        candidates = leaf_candidates(error, self._model, *self._codes)
        why, opens_rows = f"{user_line(cause)}: {reason(cause)}", isinstance(error, RowCountError)
        return self._first_of(candidates, why, opens_rows=opens_rows)

    def _instead_of(self, refused: LeafError) -> _Target | None:
        """Return what to make a leaf as another one cannot be; None where nothing can be."""
        target = refused.target
        self._refused.add(id(target.called))
        self._reasons.append(f"{target.label}: {refused.why}")
        self._targets.remove(target)
        return self._first_of(target.around, target.why, opens_rows=target.opens_rows)

    def _keeps_rows_fixed(self, cause: CaptureError) -> bool:
        """Let batches have one number of rows, if something was to be a leaf for others, and cannot; tell if so."""
        others = [target for target in self._targets if not target.opens_rows]
        gives_up = self.opens_rows and (isinstance(cause, RowCountError) or len(others) < len(self._targets))
        if gives_up:
            self.opens_rows, self._targets = False, others
        return gives_up

    def _first_of(self, candidates: Sequence[Candidate], why: str, *, opens_rows: bool) -> _Target | None:
        known = {id(target.called) for target in self._targets} | self._refused
        # A module that the forward makes itself is another one in each trace: that the last one is a leaf is in vain.
        used = {id(self._owner[name]) for name in self.used}
        in_vain = {(target.path, type(target.called)) for target in self._targets if id(target) not in used}
        for number, one in enumerate(candidates):
            if id(one.called) not in known and (one.path, type(one.called)) not in in_vain:
                return _Target.of(one.path, one.called, why, candidates[number + 1 :], False, opens_rows)
        return None

    def _like(self, found: _Target) -> Iterator[_Target]:
        """Yield what is like a leaf in other repeated blocks: it has the same code, which a trace does not pass."""
        known = {id(target.called) for target in self._targets} | self._refused
        for path, module in self._model.named_modules() if isinstance(found.called, nn.Module) else ():
            if module is not found.called and id(module) not in known:
                like = _Target.of(path, module, found.why, (), True, found.opens_rows)
                if like.kind == found.kind:
                    yield like

    def _not_inside(self, found: _Target) -> list[_Target]:
        """Return the leaves that are not inside of another one."""
        inside = set(map(id, found.modules))
        return [target for target in self._targets if id(target.called) not in inside]

    def _told(self, cause: CaptureError) -> CaptureError:
        """Return what the user sees: what was refused, and why nothing around it is a leaf."""
        if not self._reasons:
            return cause
        return CaptureError(f"{cause}\nnor can a module around the line be a leaf: {'; '.join(self._reasons)}")

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Let the forwards of leaves be ops while they are traced."""
        before = list[tuple[dict[str, Any], Any]]()
        try:
            for target in self._targets:
                if isinstance(target.called, nn.Module):
                    space = vars(target.called)
                    before.append((space, space.get("forward", ABSENT)))
                    space["forward"] = self._instead(target, target.called.forward)
            yield
        finally:
            for space, forward in reversed(before):
                put(space, "forward", forward)

    # While the model is traced.

    @contextlib.contextmanager
    def tracing(self, inputs: Mapping[str, Tensor], autocasts: Autocasts) -> Iterator[None]:
        """Trace inside, with these inputs and casts."""
        self._inputs, self._autocasts, self.used = inputs, autocasts, {}
        self._thread, self._ambient = threading.get_ident(), ambient_autocasts()
        self._shared = list[tuple[_Target, Tensor, int]]()
        try:
            yield
            self._check_unwritten()
        finally:
            self._inputs = None
            for space, name, value in reversed(self._hidden):
                put(space, name, value)
            self._hidden = []

    def _check_unwritten(self) -> None:
        """Refuse leaves that share memory with what they are given, if it is written to after them.

        Raises:
            LeafRefused: so it is.
        """
        target = next((target for target, tensor, before in self._shared if version(tensor) != before), None)
        if target is not None:
            why = "it returns what it is given, or a view of that, and one of the two is written to later"
            raise LeafError(target, why)

    def function(self, called: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is to be called in the place of the function that makes the loss."""
        target = next((one for one in self._targets if one.called is called), None)
        return called if target is None or isinstance(called, nn.Module) else partial(self._call, target, called)

    def _instead(self, target: _Target, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            return self._call(target, forward, *args, **kwargs)

        return called

    def _call(self, target: _Target, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inputs is None or threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        tree, tensors = flatten((args, kwargs))
        state = _state_of(target)
        invocation = self._invocation(target, tree, tensors, state)
        call = self._known_call(target, invocation, tensors, state)
        self.used[call.name] = call
        operands = [*state[0].values(), *state[1].values()]
        made = LEAF(list(tensors.values()), operands, None, 0, call.name, list(call.forms))
        if call.shares:
            self._shared += [(target, one, version(one)) for one in (*tensors.values(), *operands, *made)]
        for module, attribute in call.left:
            space = vars(module)
            if not isinstance(space.get(attribute), _OfALeaf):
                self._hidden.append((space, attribute, space.get(attribute, ABSENT)))
                space[attribute] = _OfALeaf(target, attribute)
        count = len(call.results)
        for name, value in zip(call.written, made[count:], strict=True):
            with torch.no_grad():
                state[1][name].copy_(value.detach())
        return unflatten(call.output, dict(zip(call.results, made[:count], strict=True)))

    def _known_call(
        self, target: _Target, invocation: Invocation, tensors: Mapping[str, Tensor], state: _State
    ) -> OpaqueCall:
        values = tuple(LeafOperand(_shape(tensor), tensor.dtype) for tensor in tensors.values())
        key = (
            id(target),
            told_tree(invocation.given),
            tuple(invocation.sizes.items()),
            tuple((str(one.shape), one.dtype) for one in values),
            invocation.differentiable,
            tuple(training for _, training in invocation.modes),
            invocation.autocasts,
        )
        if key not in self._known:
            held = [LeafOperand(tuple(map(int, one.shape)), one.dtype) for one in state[0].values()]
            held += [_buffer(one, target.buffers[name]) for name, one in state[1].items()]
            question = Question(target.called, invocation, values, tuple(held), self._example(), self._device)
            raise _UnknownLeaf(target, key, question)
        return self._known[key]

    def _invocation(self, target: _Target, tree: Tree, tensors: Mapping[str, Tensor], state: _State) -> Invocation:
        sizes = dict[str, tuple[int, int]]()
        given = map_leaves(tree, lambda leaf: _as_slot(leaf, tensors, sizes, target))
        carries = [tensor.requires_grad for tensor in (*tensors.values(), *state[0].values())]
        modes = tuple((module, module.training) for module in target.modules)
        ambient = ambient_autocasts()
        return Invocation(
            target.label,
            target.holder,
            given,
            tuple(tensors),
            sizes,
            tuple(state[0]),
            tuple(state[1]),
            tuple(carries),
            modes,
            self._autocasts if ambient == self._ambient else ambient,
        )

    def _not_of(self, target: _Target) -> list[Tensor]:
        """Return the parameters and buffers of the model that a leaf does not have; not while a trace is under way."""
        own = {id(one) for module in target.modules for one in (*module.parameters(), *module.buffers())}
        return [one for one in (*self._model.parameters(), *self._model.buffers()) if id(one) not in own]

    def _example(self) -> Mapping[sympy.Symbol, int]:
        """Return the example's sizes, by the symbols that stand for them."""
        assert self._inputs is not None, "a trace is under way"
        sizes = [size for tensor in self._inputs.values() for size in tensor.shape]
        return {meta.expression(size): meta.hint(size) for size in sizes if meta.is_symbolic(size)}


_State = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""Parameters and buffers by name."""


def _state_of(target: _Target) -> _State:
    if not isinstance(target.called, nn.Module):
        return {}, {}
    named = dict(target.called.named_buffers())
    return dict(target.called.named_parameters()), {name: named[name] for name in target.buffers}


def _buffer(traced: Tensor, known: Tensor) -> LeafOperand:
    has_values = known.device.type != "meta"
    return LeafOperand(tuple(map(int, traced.shape)), traced.dtype, known if has_values else None)


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(meta.expression(size) if meta.is_symbolic(size) else int(size) for size in tensor.shape)


def _as_slot(leaf: Leaf, tensors: Mapping[str, Tensor], sizes: dict[str, tuple[int, int]], target: _Target) -> Tree:
    """Return a slot for a size among what a leaf is given, and note of what it is the size.

    Raises:
        LeafRefused: it is given something else that is no tensor, container or plain value.
    """
    if not isinstance(leaf, Opaque):
        return leaf
    if isinstance(leaf.value, torch.SymInt):
        wanted = meta.expression(leaf.value)
        places = [(number, dim) for number, x in enumerate(tensors.values()) for dim in range(x.dim())]
        shapes = list(map(_shape, tensors.values()))
        found = next((place for place in places if shapes[place[0]][place[1]] == wanted), None)
        if found is not None:
            sizes[leaf.name] = found
            return TensorSlot(leaf.name)
    kind = "number that follows from sizes" if isinstance(leaf.value, torch.SymInt) else leaf.type_name
    raise LeafError(target, f"it is given a {kind}, where a leaf takes tensors, their sizes and plain values")
