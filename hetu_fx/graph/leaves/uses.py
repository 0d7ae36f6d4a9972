"""Which operands of leaves a backward makes gradients of.

On one device a parameter that a forward has not used has no gradient, and optimizers pass it over, weight decay
included. An op returns tensors, and none of them is that; so what it has made is noted beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hetu_fx.base.torch_private import set_thread_local, thread_local_value

Use = tuple[str, int]
"""The name of a call of a leaf, and which of its operands it has made a gradient of."""
RAN = -1
"""The number, in the place of an operand's, that says that the backward of a call has run."""
_KEY = "hetu_fx uses of leaves"


@contextmanager
def noting_uses(notes: set[Use]) -> Iterator[None]:
    """Note what backwards inside make gradients of; what is around this one, and notes it, has it as well."""
    around = thread_local_value(_KEY)
    try:
        with set_thread_local(_KEY, notes):
            yield
    finally:
        if around is not None:
            around.update(notes)


def note_uses(name: str, places: Iterable[int]) -> None:
    """Note that the backward of a call has run, and made gradients of these operands."""
    notes = thread_local_value(_KEY)
    if notes is not None:
        notes.update((name, place) for place in (RAN, *places))
