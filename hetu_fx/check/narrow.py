"""Makes tables of embeddings, and what is as wide as they are long, short: a vocabulary takes most of a small model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hetu_fx.base.dtypes import carries_gradient

LONG = 1024
"""Tables of more rows are shortened."""

_SHORT = 128
_ODD = 64  # what is left of the division by it stays, so that shards stay uneven


@dataclass(frozen=True)
class Narrowing:
    """Sizes of a model that become smaller: `sizes` has the new ones by the old ones."""

    sizes: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Narrowing:
        """Choose the sizes of a model's long tables."""
        tables = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
        return cls({rows: _SHORT + rows % _ODD for rows in tables if rows > LONG})

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape with the new sizes."""
        return tuple(self.sizes.get(size, size) for size in shape)

    def buffer(self, buffer: Tensor) -> Tensor:
        """Return the first part of a buffer, in the new sizes."""
        return buffer[tuple(slice(0, size) for size in self.shape(tuple(buffer.shape)))]

    def apply(self, model: nn.Module) -> None:
        """Let a model's attributes, and those of what configures it, say the new sizes."""
        for space in _spaces(model) if self.sizes else ():
            for key, value in space.items():
                if type(value) is int and value in self.sizes:
                    space[key] = self.sizes[value]

    def numbers(self, tensor: Tensor) -> Tensor:
        """Return whole numbers of an input, such as index the tables, below the new sizes."""
        if carries_gradient(tensor.dtype) or not tensor.numel():
            return tensor
        largest = int(tensor.max())
        fitting = [new for old, new in sorted(self.sizes.items()) if new <= largest < old]
        return tensor.where(tensor < 0, tensor % fitting[0]) if fitting else tensor


def _spaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of modules, and of other objects that they hold."""
    seen: set[int] = set()
    for module in model.modules():
        yield vars(module)
        for value in vars(module).values():
            if hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and id(value) not in seen:
                seen.add(id(value))
                yield vars(value)
