"""Checks that only raise: a trace that asks for a value is told the answer that lets the forward go on.

torch.export refuses `if (var < 0).any(): raise ValueError`, as tensors have no values in a trace. So the forward is
traced with one answer and with the other. Where one raises there and the other goes on, the graph is that of the other,
and what was asked is an output of it, which every step looks at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar

import sympy
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from hetu_fx.base.torch_private import answering_guards, forget_guard, size_guards
from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.capture_failure import INTO_A_MODULE, WAY_OUT, user_frame
from hetu_fx.graph.example import Example
from hetu_fx.graph.forward_checks import Check
from hetu_fx.graph.leaves.leaf_ops import LEAF, told_arguments
from hetu_fx.graph.tracing.meanings import is_of_the_forward
from hetu_fx.graph.tracing.read_values import ReadNumbers

aten = torch.ops.aten

_OF_SIZES = frozenset({aten._assert_scalar.default, aten.sym_constrain_range_for_size.default})
_SAME_WHERE_SHAPES_ARE = frozenset({
    aten.slice.Tensor, aten.expand.default, aten.view.default, aten.reshape.default, aten.contiguous.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.narrow.default, aten.alias.default,
})  # fmt: skip
_MOST = 4096
"""Rows up to which a number is looked for that a comparison tells from the others."""


@dataclass(frozen=True, eq=False)
class ComparedRows:
    """What a trace has found out of the number of rows.

    Attributes:
        exported: the trace.
        symbol: of the number.
        conditions: that it has gone on by; some may be of other sizes, too.
    """

    exported: ExportedProgram
    symbol: sympy.Symbol
    conditions: tuple[sympy.Expr, ...]

    @classmethod
    def of(cls, exported: ExportedProgram, example: Example) -> ComparedRows:
        """Find the conditions of a trace that was made with this example.

        Raises:
            CaptureError: the trace has fixed the number of rows.
        """
        nodes = [node for node in exported.graph.nodes if node.op == "placeholder"][-len(example.tensors) :]
        shapes = dict(zip(example.tensors, map(meta.shape, nodes), strict=True))
        sizes = {meta.expression(shapes[name][dim]) for name, dim in example.row_dims.items()}
        symbol = sizes.pop() if len(sizes) == 1 else None
        if not isinstance(symbol, sympy.Symbol):
            raise CaptureError("the number of rows is fixed")
        found = dict.fromkeys(size_guards(meta.fake_mode(exported.graph)))
        return cls(exported, symbol, tuple(one for one in found if symbol in one.free_symbols))

    def takes(self, rows: int) -> bool:
        """Tell whether the trace holds for so many rows, as far as they alone tell."""
        return all(one.subs(self.symbol, rows) is not sympy.false for one in self.conditions)

    @property
    def others(self) -> int | None:
        """Return a number of rows on the other side of the one thing that is asked of them; None where it is not one.

        The least, but for the first two, which a trace takes for others than the rest.
        """
        if len(self.conditions) != 1 or self.conditions[0].free_symbols != {self.symbol}:
            return None
        numbers = range(3, _MOST)
        return next((rows for rows in numbers if not self.takes(rows)), None)

    def matches_trace(self, other: ComparedRows) -> bool:
        """Tell whether this is the trace of another number of rows, too, for which the one condition does not hold."""
        opposite = [sympy.Not(one) for one in other.conditions]
        return list(self.conditions) == opposite and _told(self.exported) == _told(other.exported)

    def is_same_for_one(self, of_one: ExportedProgram) -> bool:
        """Tell whether a trace of one row has come out alike: nothing was squeezed, or asked, for its sake."""
        return _told_for_one(self.exported, self.symbol) == _told_for_one(of_one, self.symbol)

    def forget(self) -> None:
        """Let the trace hold for all numbers of rows."""
        for condition in self.conditions:
            forget_guard(meta.fake_mode(self.exported.graph), condition, self.symbol)


def _told(exported: ExportedProgram) -> list[Any]:
    """Return what a trace consists of, its constants included."""
    told = [(n.op, str(n.target), str(n.args), str(n.kwargs), _told_value(n)) for n in _nodes(exported)]
    return [told, _constants(exported)]


def _nodes(exported: ExportedProgram) -> Iterator[fx.Node]:
    """Yield the nodes of a trace and of the regions in it, but torch's own call that checks sizes."""
    graphs = (one.graph for one in exported.graph_module.modules() if isinstance(one, fx.GraphModule))
    return (node for graph in graphs for node in graph.nodes if node.op != "call_module")


def _constants(exported: ExportedProgram) -> str:
    return repr({name: value.tolist() for name, value in exported.constants.items() if isinstance(value, torch.Tensor)})


def _told_for_one(exported: ExportedProgram, rows: sympy.Symbol) -> list[Any]:
    """Return what a trace makes of one row: its tensors in order, each with what it is made of."""
    numbers: dict[fx.Node, int] = {}

    def of_one(size: Any) -> Any:
        return meta.expression(size).subs(rows, 1) if meta.is_symbolic(size) else size

    def form_of(node: fx.Node) -> Any:
        made = node.meta.get("val")
        return (made.dtype, [of_one(size) for size in made.shape]) if isinstance(made, torch.Tensor) else ""

    def read(argument: fx.Node) -> Any:
        made = argument.meta.get("val")
        return of_one(made) if isinstance(made, meta.SYMBOLIC) else f"%{numbers.get(argument, argument.name)}"

    told: list[Any] = [_constants(exported)]
    for node in _nodes(exported):
        if isinstance(node.meta.get("val"), meta.SYMBOLIC) or node.target in _OF_SIZES:
            continue
        form = form_of(node)
        source = node.args[0] if node.target in _SAME_WHERE_SHAPES_ARE else None
        if isinstance(source, fx.Node) and form_of(source) == form:
            numbers[node] = numbers[source]
            continue
        numbers[node] = len(told)
        told.append(str((node.op, node.target, fx.node.map_arg(_arguments(node), read), form)))
    return told


def _arguments(node: fx.Node) -> tuple[Any, Any]:
    """Return an op's arguments, but what a leaf says of its results in other sizes, whose own are told."""
    args, kwargs = told_arguments(node)
    return (args[:-1] if node.target is LEAF else args), kwargs


def _told_value(node: fx.Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, torch.Tensor) else str(value)


T = TypeVar("T")

MOST_CHECKS = 64
"""In one forward: each takes a trace of its own, up to where it raises."""

_TRACES = "hetu_fx.graph.capture"
_FAKE = re.compile(r"FakeTensor\(\.\.\.(?:[^()]|\([^()]*\))*\)")
_CURE = (
    "hint: leave the check out (torch.distributions: validate_args=False), choose between values by torch.where, "
    f"{INTO_A_MODULE}, {WAY_OUT}"
)


_Site = tuple[tuple[CodeType, int], ...]


@dataclass(frozen=True)
class _Question:
    """What a trace was asked.

    Attributes:
        where: the user's line, "file.py:41".
        code: that line.
        site: all calls that lead there, each by its place in its code.
        condition: makes what was asked, a boolean tensor without dims.
        first_answer: the one that is tried first, as it is the one that raises more often.
    """

    where: str
    code: str
    site: _Site
    condition: Callable[[], Tensor]
    first_answer: bool


@dataclass(frozen=True)
class _Decision:
    """The answer with which the forward goes on where it is asked at a site, and what the other one raises."""

    site: _Site
    answer: bool
    check: Check


class _Unanswered(Exception):
    """A question has no answer with which the forward goes on alone; with other sizes it may not be asked."""


class _Undecided(BaseException):
    """A trace has asked past the first open question: what follows is found out later. No forward catches this."""


class _Otherwise(BaseException):
    """A trace asks otherwise than those before, with other sizes: answers are found anew. No forward catches this."""


class RaisingChecks:
    """Answers what traces of one forward ask of values, in the order in which they ask.

    Attributes:
        refusal: why some question of the last trace cannot be answered; None if all can be.
    """

    def __init__(self) -> None:
        self.refusal: CaptureError | None = None
        self._decided: list[_Decision] = []
        self._passed = 0  # decisions that a trace has gone on after
        self._goes_on = False  # with the first answer to the open question
        self._begun_anew = 0
        self._begin()

    def _begin(self) -> None:
        self._asked: list[_Question] = []
        self._answers: dict[Any, bool] = {}
        self._numbers = ReadNumbers()
        self._raised: tuple[type[Exception], str] | None = None  # not the error: it would keep the trace

    @property
    def checks(self) -> tuple[Check, ...]:
        """Return the checks, in the order of `violations`."""
        return tuple(decision.check for decision in self._decided)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer what a trace of the forward asks inside."""
        self._begin()
        with answering_guards(self._answer), self._numbers:
            try:
                yield
            except Exception as error:
                self._raised = (type(error), _text(error)) if is_of_the_forward(error) else None
                raise

    def violations(self) -> tuple[Tensor, ...]:
        """Return for each check whether it raises, as tensors without dims of the trace that has gone through."""
        try:
            conditions = [question.condition() for question in self._asked]
        except CaptureError as error:
            self.refusal = error
            raise
        pairs = zip(self._decided, conditions, strict=False)
        return tuple(torch.logical_not(asked) if decision.answer else asked for decision, asked in pairs)

    def settled(self, trace: Callable[[], T]) -> T:
        """Return a trace in which all questions are answered, tracing as often as it takes to know how.

        Answers are kept for traces with other sizes, as long as these ask the same.

        Raises:
            Exception: what the trace raises with all questions answered; or one is not, and `refusal` says why.
        """
        self.refusal, self._goes_on = None, False
        while True:
            error: BaseException | None = None
            try:
                made = trace()
            except (Exception, SystemExit, _Undecided) as raised:  # whatever a forward raises for an answer
                error = raised
            except _Otherwise:
                self._decided, self._passed, self._goes_on = [], 0, False
                continue
            if len(self._asked) > len(self._decided):
                self._decide(error)
            elif error is None and self.refusal is not None:
                raise self.refusal  # which the forward has caught
            elif error is None:
                del self._decided[len(self._asked) :]
                self._passed = len(self._decided)
                return made
            else:
                self._note_if_both_raise()
                raise error

    def _answer(self, expression: Any, error: Exception) -> bool:
        """Say whether what is asked holds; raise the error of the trace where no tensor can tell that."""
        if expression not in self._answers:
            condition = self._numbers.condition(expression)
            if condition is None:
                raise error
            question = _Question(*user_frame(), _site(), condition, not self._numbers.is_over_all(expression))
            self._answers[expression] = self._answer_next(question)
        return self._answers[expression]

    def _answer_next(self, question: _Question) -> bool:
        number = len(self._asked)
        self._asked.append(question)
        if number >= MOST_CHECKS:
            raise self._refused(question.where, f"asks for more than {MOST_CHECKS} values")
        if number > len(self._decided):
            raise _Undecided
        if number == len(self._decided):
            return question.first_answer != self._goes_on
        known = self._decided[number]
        if known.site != question.site:
            self._begun_anew += 1
            if self._begun_anew > MOST_CHECKS:
                raise self._refused(question.where, "asks for other values whenever it is traced")
            raise _Otherwise
        return known.answer

    def _decide(self, error: BaseException | None) -> None:
        """Take in what an answer to the first open question has led to."""
        if isinstance(error, CaptureError | _Unanswered):
            raise error
        number = self._passed = len(self._decided)
        question = self._asked[number]
        tried = question.first_answer != self._goes_on
        if self._raised is not None and len(self._asked) == number + 1:
            check = Check(f"check_{number}", question.where, question.code, *self._raised)
            self._decided.append(_Decision(question.site, not tried, check))
            self._goes_on = False
        elif self._goes_on:
            raise self._refused(question.where, f"asks `{question.code}`, and goes on either way")
        else:
            self._goes_on = True

    def _note_if_both_raise(self) -> None:
        """Note where the answer that was left to the last question raises, too."""
        if self._raised is not None and len(self._asked) == len(self._decided) > self._passed:
            last = self._decided[-1].check
            self._refused(last.where, f"asks `{last.code}`, and raises either way ({self._raised[1]})")

    def _refused(self, where: str, why: str) -> _Unanswered:
        self.refusal = CaptureError(
            f"cannot capture the model at {where}: the forward {why}, but a graph has no values when it is made\n"
            f"{_CURE}"
        )
        return _Unanswered(why)


def _site() -> _Site:
    """Return the calls that have led from a trace's beginning here."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _TRACES:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _text(error: Exception) -> str:
    """Return what an error says; tensors of the trace, of which it has no values, as others would be."""
    return _FAKE.sub("tensor(...)", str(error)).replace("FakeTensor", "Tensor")
