"""Buffers that a forward assigns anew (`self.mean = 0.9 * self.mean + ...`): to a trace, writes to those there are.

torch.export follows assignments to buffers of its root module alone, which the user's model is not: on others, what is
assigned would be lost without a word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from hetu_fx.base.torch_private import buffer_slots
from hetu_fx.errors import CaptureError

_WAY_OUT = (
    "hint: register the buffer before, in its final shape and dtype, and write to it (buffer.copy_(...)), or return "
    "the value"
)


@dataclass(frozen=True, eq=False)
class _Slot:
    """A place for a buffer in a module, by the name that it has in the model."""

    buffers: dict[str, Tensor | None]
    name: str
    path: str
    buffer: Tensor | None

    @property
    def key(self) -> tuple[int, str]:
        """Return what tells it from others: a trace has several objects for a module, with the module's buffers."""
        return id(self.buffers), self.name

    @property
    def now(self) -> Tensor | None:
        """Return what stands there now."""
        return self.buffers.get(self.name)


Ties = Collection[frozenset[str]]
"""Names of buffers that are one."""


def tied_buffers(model: nn.Module) -> Ties:
    """Return which names of a model's buffers stand for one; while it is traced, each has a tensor of its own."""
    names: dict[int, set[str]] = {}
    for slot in _slots(model):
        names.setdefault(id(slot.buffer), set()).add(slot.path)
    return [frozenset(found) for found in names.values() if len(found) > 1]


@contextmanager
def written_back(model: nn.Module, ties: Ties) -> Iterator[None]:
    """Write what is assigned to buffers inside to the buffers that stood there, which stay the model's.

    Args:
        model: the model that is traced.
        ties: as `tied_buffers` tells before that.

    Raises:
        CaptureError: a buffer is new, gone, or of another shape or dtype; one of several names has become another.
    """
    before = _slots(model)
    yield
    _check_none_is_new(model, before)
    changed = [slot for slot in before if slot.now is not slot.buffer]
    for slot in changed:
        _check(slot)
    _check_ties({slot.path: slot.now for slot in changed}, ties)
    for slot in changed:
        assert slot.buffer is not None, "it has been checked"
        assigned, slot.buffers[slot.name] = slot.now, slot.buffer
        assert assigned is not None, "it has been checked"
        slot.buffer.copy_(assigned.detach())


def _slots(model: nn.Module) -> list[_Slot]:
    """Return each place for a buffer once, by the first of its module's names."""
    found: dict[tuple[int, str], _Slot] = {}
    for path, module in model.named_modules():
        buffers = buffer_slots(module)
        for name, buffer in buffers.items():
            slot = _Slot(buffers, name, f"{path}.{name}" if path else name, buffer)
            found.setdefault(slot.key, slot)
    return list(found.values())


def _check_none_is_new(model: nn.Module, before: list[_Slot]) -> None:
    known = {slot.key for slot in before}
    new = [slot.path for slot in _slots(model) if slot.key not in known]
    if new:
        raise CaptureError(f"forward registers the buffers {new}, which a graph cannot keep\n{_WAY_OUT}")


def _check(slot: _Slot) -> None:
    """Refuse what cannot be written to the buffer that stood in a slot."""
    old, new = slot.buffer, slot.now
    if old is None or new is None:
        raise CaptureError(
            f"forward {'makes' if old is None else 'takes away'} the buffer {slot.path!r}, and is another one with it "
            f"than without\n{_WAY_OUT}"
        )
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        forms = (f"{one.dtype} {list(one.shape)} on {one.device}" for one in (old, new))
        raise CaptureError(f"forward makes the buffer {slot.path!r}, {' into '.join(forms)}\n{_WAY_OUT}")


def _check_ties(assigned: Mapping[str, Tensor | None], ties: Ties) -> None:
    """Refuse that one of several names of a buffer becomes another, and others do not."""
    for path, new in assigned.items():
        names = next((names for names in ties if path in names), ())
        others = sorted(name for name in names if assigned.get(name) is not new)
        if others:
            raise CaptureError(f"forward assigns {path!r}, but {others} stay what both were\n{_WAY_OUT}")
