"""What parameters cost as long as training lasts: weights, gradients, a master copy, and what the optimizer keeps.

Bytes of parameters are known to every cost; all else is told as a multiple of them, by element types. Where nothing is
said of these, gradients and two moments (Adam's) are as large as the parameters, whatever their type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from hetu_fx.base.documents import nearest
from hetu_fx.base.json_values import TEXTS
from hetu_fx.base.records import Key, record
from hetu_fx.errors import ProfileError

SIZES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Bytes of an element, by type."""

OPTIMIZERS: Mapping[str, int] = {
    "adafactor": 0,
    "adagrad": 1,
    "adadelta": 2,
    "adam": 2,
    "adamax": 2,
    "adamw": 2,
    "asgd": 1,
    "muon": 1,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
    "rprop": 2,
    "sgd": 0,
    "sgd_momentum": 1,
}
"""How many values torch's optimizers keep for an element of a parameter, as they are if no option is given."""

ADAM = "adamw"
_COUNTS = ("no", "one", "two", "three", "four")


@dataclass(frozen=True)
class ParameterState:
    """What an element of a parameter costs.

    Attributes:
        dtype: of the parameters (of `SIZES`); None: not known, all that stands beside them is of their size.
        gradient: element type of gradients; None: the parameters'.
        master: element type of a copy that the optimizer updates; None: it has none.
        optimizer: what keeps the slots, one of `OPTIMIZERS`; another name needs `slots`.
        slots: element type of each value that the optimizer keeps for an element; None: as many as it is known to, of
            the master's type or else the parameters'.
        by_lists: whether the optimizer updates all parameters at once by kernels over lists (`foreach=True`), which
            hold a value for each element for a moment.
    """

    dtype: str | None = None
    gradient: str | None = None
    master: str | None = None
    optimizer: str = ADAM
    slots: tuple[str, ...] | None = None
    by_lists: bool = False

    def __post_init__(self) -> None:
        given = [self.dtype, self.gradient, self.master, *(self.slots or ())]
        for name in given:
            if name is not None and name not in SIZES:
                raise ProfileError(f"state has element type {name!r}{nearest(name, tuple(SIZES))}")
        if self.dtype is None and any(given):
            raise ProfileError(
                "state names element types of what is kept next to the parameters\nhint: give their dtype too"
            )
        if self.slots is None and self.optimizer not in OPTIMIZERS:
            raise ProfileError(
                f"state has optimizer {self.optimizer!r}{nearest(self.optimizer, tuple(OPTIMIZERS))}\n"
                f"hint: name one of these, or give its slots"
            )

    @property
    def _own(self) -> float:
        return float(SIZES.get(self.dtype or "", 1))

    @property
    def kept_types(self) -> tuple[str | None, ...]:
        """Return the element types of what the optimizer keeps besides a master copy."""
        if self.slots is not None:
            return self.slots
        return (self.master or self.dtype,) * OPTIMIZERS[self.optimizer]

    @property
    def optimizer_share(self) -> float:
        """Return the bytes of the master copy and of the slots, as a multiple of the parameters'."""
        return sum(map(self._share, (*self.kept_types, *([self.master] if self.master else []))))

    @property
    def gradient_share(self) -> float:
        """Return the bytes of gradients, as a multiple of the parameters'."""
        return self._share(self.gradient)

    @property
    def update_share(self) -> float:
        """Return the bytes of a value of the optimizer's arithmetic, as a multiple of the parameters'."""
        return self._share(self.master)

    def _share(self, dtype: str | None) -> float:
        return SIZES[dtype] / self._own if dtype else 1.0

    @property
    def whole_share(self) -> float:
        """Return the bytes of all of it, as a multiple of the parameters'."""
        return 1.0 + self.gradient_share + self.optimizer_share

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.whole_share:g} times the bytes of the parameters: {self._parts}; no dtype is known"
        return f"{self.whole_share * self._own:g} bytes a parameter: {self._parts}"

    @property
    def _parts(self) -> str:
        """Return what there is, by element type: `bf16 weights and gradients, fp32 master and two moments (adamw)`."""
        runs = [(dtype, [name for _, name in run]) for dtype, run in groupby(self._named(), lambda pair: pair[0])]
        texts = [f"{dtype or ''} {_and(names)}".strip() for dtype, names in runs]
        return f"{', '.join(texts)} ({self.optimizer}{', by lists' if self.by_lists else ''})"

    def _named(self) -> Iterator[tuple[str | None, str]]:
        yield from ((self.dtype, "weights"), (self.gradient or self.dtype, "gradients"))
        if self.master is not None:
            yield self.master, "master"
        for dtype, run in groupby(self.kept_types):
            count = len(list(run))
            noun = "moment" if self.optimizer.startswith("adam") else "state"
            number = _COUNTS[count] if count < len(_COUNTS) else str(count)
            yield dtype, f"{number} {noun}{'s' if count > 1 else ''}"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


UNSAID = ParameterState()
"""Where nothing is said."""

STATE = record(
    ParameterState,
    ProfileError,
    order="dtype gradient master optimizer slots by_lists",
    optimizer=Key(written="always"),
    slots=Key(TEXTS),
)
