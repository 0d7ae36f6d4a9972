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

import torch
from torch import Tensor

from hetu_fx.base.torch_private import answering_guards
from hetu_fx.errors import CaptureError
from hetu_fx.graph.capture_failure import INTO_A_MODULE, WAY_OUT, user_frame
from hetu_fx.graph.forward_checks import Check
from hetu_fx.graph.tracing.meanings import is_of_the_forward
from hetu_fx.graph.tracing.read_values import ReadNumbers

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
