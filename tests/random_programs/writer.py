"""Writes the source of a small model, statement by statement, and knows the shape of what each makes."""

from __future__ import annotations

from dataclasses import dataclass, field

Dims = tuple[int, ...]
SIZES = (2, 3, 4, 5, 6, 8)
"""Of dims: odd ones, and some of which a device gets a single index."""


@dataclass(frozen=True)
class Value:
    """A variable of the forward: its name, and its dims after that of the rows."""

    name: str
    dims: Dims

    @property
    def last(self) -> int:
        """Return the size of the last dim."""
        return self.dims[-1]


@dataclass
class Writer:
    """The lines of a module's `__init__` and `forward` so far.

    Attributes:
        made: lines of `__init__`.
        done: lines of `forward`.
        values: what the forward has made, in order; all begin with the rows of the batch.
    """

    made: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def module(self, text: str) -> str:
        """Make a submodule, and return what calls it."""
        return self.held("m", text)

    def parameter(self, dims: Dims, around: float = 0.0) -> str:
        """Make a parameter, and return its name in the forward."""
        shape = ", ".join(map(str, dims))
        return self.held("p", f"nn.Parameter({around} + 0.3 * torch.randn({shape}))")

    def buffer(self, text: str) -> str:
        """Make a buffer, and return its name in the forward."""
        name = f"b{len(self.made)}"
        self.made.append(f'self.register_buffer("{name}", {text})')
        return f"self.{name}"

    def held(self, prefix: str, text: str) -> str:
        name = f"self.{prefix}{len(self.made)}"
        self.made.append(f"{name} = {text}")
        return name

    def value(self, text: str, dims: Dims) -> Value:
        """Make a value, and return it."""
        value = Value(f"v{len(self.done)}", dims)
        self.done.append(f"{value.name} = {text}")
        self.values.append(value)
        return value

    def source(self, name: str, parameters: str, returned: str) -> str:
        """Return the source of the module."""
        made = "\n".join(f"        {line}" for line in ("super().__init__()", *self.made))
        done = "\n".join(f"        {line}" for line in (*self.done, f"return {returned}"))
        head = f"class {name}(nn.Module):\n    def __init__(self):\n{made}"
        return f"{head}\n\n    def forward(self, {parameters}):\n{done}\n"
