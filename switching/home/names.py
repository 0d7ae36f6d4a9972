"""What tensors of a run are called, so that its ranks can ask each other for them.

A parameter by its name; what an optimizer keeps of it by that, the optimizer's number and its key; a copy by what it is
a copy of, after how many writes, and its dtype. Others have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hetu_fx.base.torch_private import version
from hetu_fx.switching.home.held import COPIED, JOINT, Held, Key, is_copy
from hetu_fx.switching.home.piece_copies import all_copies, copy_at, swaps
from hetu_fx.switching.home.stepped import numbered
from hetu_fx.switching.home.tensor import HomeTensor


class Names:
    """Names of the home tensors of one run, the same on all ranks.

    Args:
        homes: the home parameters by name.
    """

    def __init__(self, homes: Mapping[str, nn.Parameter]) -> None:
        self.homes = {name: _home(parameter) for name, parameter in homes.items()}
        self._parameters = dict(homes)
        self._index: dict[int, tuple[Key, HomeTensor]] = {}
        self._swaps = -1  # before the index was made

    def name_of(self, piece: torch.Tensor) -> Key | None:
        """Return the key of the parameter, or the optimizer's state, whose piece this is; None if it is of none."""
        for is_new in (False, True):
            if is_new or self._swaps != swaps():
                self._swaps = swaps()
                self._index = {id(tensor.local): (key, tensor) for key, tensor in self._named()}
            found = self._index.get(id(piece))
            if found is not None and found[1].local is piece:
                return found[0]
            if copy_at(piece) is not None:  # not what the index has missed, most likely: there are many of them
                return None
        return None

    def copy_name_of(self, piece: torch.Tensor) -> Key | None:
        """Return the key of a copy of something with a name; None if it is none, or one of several."""
        key = self._copy_key(piece)
        if key is None or version(piece) == 0:
            return key
        alike = [held for held in self.held(key) if held.writes == version(piece)]
        return key if len(alike) == 1 else None

    def _copy_key(self, piece: torch.Tensor) -> Key | None:
        copied = copy_at(piece)
        source = None if copied is None else copied.source()
        if copied is None or source is None:
            return None
        origin = self.name_of(source) or self._copy_key(source)
        return None if origin is None else (*origin, COPIED, str(copied.writes), str(piece.dtype))

    def held(self, key: Key) -> list[Held]:
        """Return what this rank holds under a key: several, if it is one of copies."""
        if key[0] == JOINT:
            return []
        if is_copy(key):
            alike = [(p, its) for p, its in all_copies() if (str(its.writes), str(p.dtype)) == key[-2:]]
            return [Held(piece, piece, its.layout) for piece, its in alike if self._copy_key(piece) == key]
        if len(key) == 1:
            return [Held.home(self.homes[key[0]])]
        name, number, state = key
        found = [one.state.get(self._parameters[name], {}).get(state) for one, its in numbered() if its == int(number)]
        return [Held.home(tensor) for tensor in found if isinstance(tensor, HomeTensor)]

    def _named(self) -> Iterator[tuple[Key, HomeTensor]]:
        for name, home in self.homes.items():
            yield (name,), home
            for optimizer, number in numbered():
                for key, value in list(optimizer.state.get(self._parameters[name], {}).items()):  # threads ask too
                    if isinstance(value, HomeTensor):
                        yield (name, str(number), str(key)), value


def _home(parameter: nn.Parameter) -> HomeTensor:
    assert isinstance(parameter, HomeTensor)
    return parameter
