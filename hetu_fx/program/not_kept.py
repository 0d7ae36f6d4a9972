"""What stands for attributes that a forward sets to values that only a trace has had."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from hetu_fx.base.torch_private import tree_leaves
from hetu_fx.errors import StateError
from hetu_fx.graph.meta import SYMBOLIC
from hetu_fx.program.contents import PLAIN


class NotKept:
    """Stands for what a forward has left in an attribute: the graphs that run it leave nothing. Any use is refused."""

    def __init__(self, label: str) -> None:
        self.__dict__["label"] = label

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StateError(
            f"{self.__dict__['label']} is set by the forward, but that runs as captured graphs, which set nothing; "
            f'return the value as an output, or use hetu_fx.auto_parallelize(..., capture="eager")'
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse, but for the protocols that others look for."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be an operand."""
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, NotKept))._refuse()

    def __repr__(self) -> str:
        return f"<{self.__dict__['label']}: set by the forward, not kept by graphs>"

    __call__ = __getitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __eq__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __pow__ = __matmul__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __hash__ = object.__hash__


def is_of_the_trace(value: Any) -> bool:
    """Tell whether a value is none that is left after a trace: a tensor or a size of it, or has some."""
    match value:
        case dict():
            return any(map(is_of_the_trace, value.values()))
        case list() | tuple() | set() | frozenset():
            return any(map(is_of_the_trace, value))
        case _:
            return isinstance(value, (Tensor, *SYMBOLIC)) or not (isinstance(value, PLAIN) or callable(value))
