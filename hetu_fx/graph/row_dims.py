"""Which dim of each input counts the rows of the batch, if any: whoever counts, cuts, joins or moves rows asks here.

Rows are dim 0 of every tensor that has as many entries there as the first one, unless the user says otherwise
(`row_dims`). What an input must have in common with the others for any batch, the captured graph shows on top
(`graph.assemble`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from hetu_fx.errors import BatchError

Size = TypeVar("Size")

RowDims = Mapping[str, int]
"""The dim that counts rows, by the name of an input; inputs without rows are left out."""


@dataclass(frozen=True)
class AskedRowDims:
    """What the user has said of the rows of inputs.

    Attributes:
        dims: by the name of an input, or of a container of inputs: the dim that counts rows, negative from the last
            one; None: it has no rows. Of what is not named, the sizes of the example tell.
    """

    dims: Mapping[str, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dim in self.dims.items():
            if not isinstance(name, str) or not (dim is None or type(dim) is int):
                raise BatchError(
                    f"row_dims has {name!r}: {dim!r}\nhint: give names of inputs, with the dim that counts rows or None"
                )

    def has(self, name: str) -> bool:
        """Tell whether the user has said something of an input."""
        return self._key(name) is not None

    def denies(self, name: str) -> bool:
        """Tell whether the user has said that an input has no rows."""
        key = self._key(name)
        return key is not None and self.dims[key] is None

    def of(self, name: str, tensor: Tensor) -> int | None:
        """Return the dim that the user has named, None where the input has no rows.

        Raises:
            BatchError: the input has no such dim.
        """
        dim = self.dims[self._key(name) or name]
        if dim is not None and not -tensor.dim() <= dim < tensor.dim():
            raise BatchError(
                f"row_dims says that dim {dim} of input {name!r} counts its rows, but its shape is "
                f"{tuple(tensor.shape)}\nhint: give one of its dims, or None if it has no rows"
            )
        return None if dim is None else dim % tensor.dim()

    def check_names(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `BatchError` for names of no input of an example batch."""
        known = {key for name in tensors for key in _keys_of(name)}
        if strangers := sorted(self.dims.keys() - known):
            raise BatchError(
                f"row_dims names {strangers}, but the inputs of the batch are {sorted(tensors)}\n"
                f"hint: use the names that the model's forward gives them (nested ones joined by dots)"
            )

    def _key(self, name: str) -> str | None:
        return next((key for key in _keys_of(name) if key in self.dims), None)


NOTHING_ASKED = AskedRowDims()


def _keys_of(name: str) -> list[str]:
    """Return what an input can be named by: its own name, then those of the containers around it."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def find_row_dims(tensors: Mapping[str, Tensor], asked: AskedRowDims = NOTHING_ASKED) -> dict[str, int]:
    """Return the row dims of an example batch: as asked, and dim 0 of what is not named and has as many entries there.

    Raises:
        BatchError: an input has no such dim, or inputs that were named have unlike numbers of rows.
    """
    named = {name: asked.of(name, tensor) for name, tensor in tensors.items() if asked.has(name)}
    dims = {name: dim for name, dim in named.items() if dim is not None}
    free = {name: tensor for name, tensor in tensors.items() if name not in named and tensor.dim()}
    rows = count_rows(tensors, dims) if dims else next((int(tensor.shape[0]) for tensor in free.values()), None)
    dims |= {name: 0 for name, tensor in free.items() if int(tensor.shape[0]) == rows}
    return {name: dims[name] for name in tensors if name in dims}


def count_rows(tensors: Mapping[str, Tensor], dims: RowDims) -> int:
    """Return the rows of a batch; 1 where no input has any.

    Raises:
        BatchError: inputs have unlike numbers of rows.
    """
    rows = {name: int(tensors[name].shape[dim]) for name, dim in dims.items() if name in tensors}
    if len(set(rows.values())) > 1:
        raise BatchError(
            f"inputs have different numbers of rows: {rows}\n"
            f"hint: give one row per sample in each. Where rows are not dim 0 of an input, or it has none, pass "
            f"row_dims={_example(rows)}"
        )
    return next(iter(rows.values()), 1)


def _example(rows: Mapping[str, int]) -> str:
    first, *_, last = rows
    return f'{{"{first}": 1, "{last}": None}}'


def slice_rows(tensor: Tensor, dim: int, interval: range) -> Tensor:
    """Return the rows of an interval: a view where rows are dim 0, as all of them are; else a copy without gaps.

    A graph may view an input in other sizes, which a tensor with gaps does not allow.
    """
    if interval == range(tensor.shape[dim]):
        return tensor
    if dim == 0:
        return tensor[interval.start : interval.stop]
    return tensor.narrow(dim, interval.start, len(interval)).contiguous()


def with_rows(shape: tuple[Size, ...], dim: int, rows: Size) -> tuple[Size, ...]:
    """Return the shape of a tensor with another number of rows."""
    return (*shape[:dim], rows, *shape[dim + 1 :])


def other_dims(tensor: Tensor, dim: int | None) -> list[int]:
    """Return all dims of an input but that of its rows."""
    return [other for other in range(tensor.dim()) if other != dim]
