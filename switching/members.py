"""What a model consists of after the call: parameters and buffers that the script has replaced, added or taken away.

A new parameter becomes a home parameter, the same object, as all were at the start; one that is gone is let go.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hetu_fx.program.structure import Structure
from hetu_fx.switching.home.tensor import HomeTensor


class MemberWatch:
    """Notices changes of what a model consists of, on this rank.

    Args:
        model: the user's.
        homes: its home parameters by first name; brought up to date in place, as many refer to them.

    Attributes:
        count: how often parameters or buffers have become others; the same on all ranks, or a step is refused.
    """

    def __init__(self, model: nn.Module, homes: Mapping[str, nn.Parameter]) -> None:
        self.model, self.homes = model, homes
        self.count = 0
        self._looked_at: Structure | None = None
        self._trained = self._trained_now()
        self._buffers = dict(model.named_buffers())

    def look(self, structure: Structure) -> bool:
        """Tell whether parameters, what is trained of them, or buffers are others than at the last `settle`."""
        if structure is self._looked_at:
            return False
        same = (
            _are_same(dict(self.model.named_parameters()), self.homes)
            and _are_same(dict(self.model.named_buffers()), self._buffers)
            and self._trained_now() == self._trained
        )
        self._looked_at = structure if same else None
        self.count += not same
        return not same

    @property
    def strangers(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are no home parameters yet, by first name."""
        return {name: p for name, p in self.model.named_parameters() if not isinstance(p, HomeTensor)}

    @property
    def new_buffers(self) -> list[str]:
        """Return the names of the buffers that are others than before."""
        return [name for name, one in self.model.named_buffers() if self._buffers.get(name) is not one]

    @property
    def has_other_parameters(self) -> bool:
        """Tell whether parameters, not only flags or buffers, are others."""
        return not _are_same(dict(self.model.named_parameters()), self.homes)

    def settle(self) -> None:
        """Take what the model has now as its members; all parameters are home parameters by now."""
        assert isinstance(self.homes, dict), "the one mapping that all refer to"
        now = dict(self.model.named_parameters())
        self.homes.clear()
        self.homes.update(now)
        self._trained = self._trained_now()
        self._buffers = dict(self.model.named_buffers())

    def _trained_now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.model.parameters()]


def _are_same(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> bool:
    return now.keys() == before.keys() and all(now[name] is before[name] for name in now)
