"""Checks of values that a forward makes and raises by: what they ask, and the error that a step raises for them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from hetu_fx.errors import ForwardCheckError


@dataclass(frozen=True)
class Check:
    """A question about values, of which one answer raises; the graph is that of the other.

    Attributes:
        name: of the graph's output that says how often the answer is that which raises, or whether it is.
        where: the user's line that asks, "file.py:41".
        code: that line.
        kind: the type of what the forward raises.
        text: what that said in the trace, where tensors have no values.
    """

    name: str
    where: str
    code: str
    kind: type[Exception]
    text: str

    def error(self) -> ForwardCheckError:
        """Make the error, which is of the forward's type as well, where a type can be both."""
        made = ForwardCheckError(
            f"{self.text or self.kind.__name__}\n"
            f"raised as {self.kind.__name__} by the check at {self.where}, for rows of this batch: {self.code}"
        )
        with suppress(TypeError):  # the forward's type lays its objects out in another way
            made.__class__ = _joint_type(self.kind)
        return made


def _joint_type(kind: type[Exception]) -> type[ForwardCheckError]:
    """Return a type of errors that are caught as a check's, and as what the forward raises."""
    names = {
        "__module__": __name__,  # and not where errors are listed
        "__str__": BaseException.__str__,  # a KeyError shows its text as a key
        "__reduce__": lambda error: (ForwardCheckError, error.args),  # another process has no such type
    }
    return type(ForwardCheckError.__name__, (ForwardCheckError, kind), names)
