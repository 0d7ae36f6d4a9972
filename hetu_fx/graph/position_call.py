"""A call and what is known of its operands by position: what a reader is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from hetu_fx.graph import meta
from hetu_fx.graph.affine import FALSE, TRUE, Affine, Positional
from hetu_fx.graph.calls import arguments

Known = Mapping[fx.Node, Positional]


@dataclass(frozen=True, slots=True)
class Call:
    """A call and what is known of its operands."""

    node: fx.Node
    known: Known

    def given(self, name: str) -> Any:
        """Return an argument as the graph has it."""
        return arguments(self.node)[name]

    def value(self, name: str) -> Positional | None:
        """Return what an argument is, tensor or number, if that is known."""
        return self.value_of(self.given(name))

    def value_of(self, item: object) -> Positional | None:
        """Return what a node or a number is, if that is known."""
        match item:
            case bool():
                return TRUE if item else FALSE
            case int():
                return Affine(item)
            case fx.Node():
                return self.known.get(item)
        return None

    def affine(self, name: str) -> Affine | None:
        """Return an argument that is an affine integer."""
        value = self.value(name)
        return value if isinstance(value, Affine) else None

    @property
    def ndim(self) -> int:
        """The number of dims of the first argument."""
        return len(meta.shape(self.node.args[0]))  # type: ignore[arg-type]

    @property
    def is_integral(self) -> bool:
        """Whether the result holds integers, which arithmetic here is exact for."""
        dtype = meta.dtype(self.node)
        return not dtype.is_floating_point and not dtype.is_complex
