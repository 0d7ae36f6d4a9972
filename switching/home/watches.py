"""What the script writes to parameters and buffers, which have names: counted, and compared by signs of values.

A rank keeps its part of what it writes. So what one writes alone (a state dict that only rank 0 loads), or ranks write
unlike (weights drawn from seeds of their own), would leave wholes of which each part is another one's.

Where a submodule or a parameter is used alone, outside of the model's own calls, a home parameter is whole, and so is
its gradient: of the rows that this rank used. Ranks that used other rows have unlike ones, of which each would keep its
part. Those that used the same (a penalty of weights) have the gradient of one device. Signs of gradients show which.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from operator import sub
from typing import Any, ClassVar

from torch import nn
from torch.autograd.graph import get_gradient_edge

from hetu_fx.base.torch_private import version
from hetu_fx.switching.home.journal import journal
from hetu_fx.switching.home.parameters import Buffers
from hetu_fx.switching.home.piece_copies import swaps
from hetu_fx.switching.home.tensor import HomeTensor
from hetu_fx.switching.home.values import Sign, Signed, signed, take_sign
from hetu_fx.switching.home.watch import BY_ALL, SAME, named, numbers_of, times, unequally_counted, unlike_signs, were


class _Counts:
    """How often the script has written things of a kind, by name."""

    lasts: ClassVar[bool] = True
    kind: ClassVar[str]
    what_to_do: ClassVar[str]

    def settle(self) -> None:
        """Do nothing: totals are compared."""

    def problem(self, told: Sequence[Mapping[str, int]]) -> str:
        """Name what was written unequally often."""
        unlike = unequally_counted(told)
        if not unlike:
            return ""
        shown = f"{were(unlike, self.kind)} written unequally often by the processes: {times(told, unlike[0])}"
        return f"{shown}. {self.what_to_do}"


class ParameterCounts(_Counts):
    """How often the script has written each parameter, steps of optimizers included."""

    kind = "parameter"
    what_to_do = (
        f"A process that writes alone (load_state_dict, copy_, an initialisation) changes its own part of a parameter "
        f"and no other's; {BY_ALL}, or before hetu_fx.auto_parallelize, which takes process 0's"
    )

    def __init__(self, homes: Mapping[str, nn.Parameter]) -> None:
        self._homes = homes
        self.begin()
        self._before = [0] * len(self._tensors)  # what was written to a copy before its first call counts

    def begin(self) -> None:
        """Count from now on, for what are the parameters now."""
        self._tensors = list(self._homes.values())
        self._before = list(map(version, self._tensors))

    @property
    def number(self) -> tuple[int, ...]:
        """Return the counts."""
        return tuple(map(sub, map(version, self._tensors), self._before))

    @property
    def detail(self) -> dict[str, int]:
        """Return them by name."""
        return dict(zip(self._homes, self.number, strict=True))


class BufferCounts(_Counts):
    """How often the script has written each buffer; steps that write them do not count."""

    kind = "buffer"
    what_to_do = f"Each process has a copy, which the others do not see; {BY_ALL}"

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.begin()

    def begin(self) -> None:
        """Count from now on, for what are the buffers now."""
        self._buffers.look()
        self._before = self._buffers.script_writes()

    @property
    def number(self) -> tuple[int, ...]:
        """Return the counts."""
        return tuple(self.detail.values())

    @property
    def detail(self) -> dict[str, int]:
        """Return them by name."""
        return {name: count - self._before[name] for name, count in self._buffers.script_writes().items()}


class BufferValues:
    """What the script has written to buffers."""

    lasts: ClassVar[bool] = False

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.begin()

    def begin(self) -> None:
        """Compare what is written from now on."""
        self._before = self._buffers.script_writes()

    def settle(self) -> None:
        """Compare what is written from now on."""
        self.begin()

    @property
    def number(self) -> Hashable:
        """Return numbers of signs."""
        return numbers_of(self.detail.values())

    @property
    def detail(self) -> dict[str, Sign]:
        """Return the signs of the buffers that were written."""
        now = self._buffers.script_writes()
        written = [name for name, count in now.items() if count != self._before[name]]
        return {name: signed(self._buffers.named(name)).sign for name in written}

    def problem(self, told: Sequence[Mapping[str, Sign]]) -> str:
        """Name the buffers that were written unlike."""
        unlike = unlike_signs(told)
        return f"{were(unlike, 'buffer')} written with unlike values by the processes; {SAME}" if unlike else ""


class ParameterValues:
    """The whole plain values that the script has written to parameters."""

    lasts: ClassVar[bool] = False

    def __init__(self, homes: Mapping[str, nn.Parameter]) -> None:
        self._homes = homes
        self._seen = 0
        self._signs: dict[str, Sign] = {}

    def begin(self) -> None:
        """Do nothing: values stand where they were written."""

    def settle(self) -> None:
        """Forget the values."""
        self._signs = {}

    @property
    def number(self) -> Hashable:
        """Return numbers of signs."""
        return numbers_of(self.detail.values())

    @property
    def detail(self) -> dict[str, Sign]:
        """Return signs by name."""
        if self._seen != journal().values.count:
            self._seen = journal().values.count
            found = {name: take_sign(vars(home).get("local")) for name, home in self._homes.items()}
            self._signs.update((name, sign) for name, sign in found.items() if sign is not None)
        return self._signs

    def problem(self, told: Sequence[Mapping[str, Sign]]) -> str:
        """Name the parameters that were written unlike."""
        unlike = unlike_signs(told)
        if not unlike:
            return ""
        return (
            f"{were(unlike, 'parameter')} written with unlike values by the processes. Each keeps its own part of "
            f"what it writes, so that the whole would be what none of them meant; {SAME}"
        )


class GradientsFromOutside:
    """The gradients that parameters had from outside of the model's calls."""

    lasts: ClassVar[bool] = False

    def __init__(self, homes: Mapping[str, nn.Parameter]) -> None:
        self._homes = homes
        self._gradients = OutsideGradients()
        self.begin()

    def begin(self) -> None:
        """Watch what are the parameters now."""
        self._swaps = swaps()
        self._gradients.watch(self._homes)

    def settle(self) -> None:
        """Forget the gradients."""
        self._gradients.forget()

    @property
    def number(self) -> Hashable:
        """Return numbers of signs."""
        return numbers_of(self.detail.values())

    @property
    def detail(self) -> Mapping[str, Sign]:
        """Return signs by name of parameter."""
        if self._swaps != swaps():  # of dtypes, it may be: torch adds to gradients elsewhere then
            self.begin()
        return self._gradients.signs

    def problem(self, told: Sequence[Mapping[str, Sign]]) -> str:
        """Name the parameters whose gradients are unlike."""
        unlike = unlike_signs(told)
        if not unlike:
            return ""
        norms = ", ".join(f"{one[unlike[0]].norm:.4g}" if unlike[0] in one else "none" for one in told)
        return (
            f"{named(unlike, 'parameter')} had a gradient from outside of the model's own calls (of a submodule, or "
            f"of the parameter itself) that is unlike on the processes (of {unlike[0]!r} with norms {norms}, by rank): "
            f"each used its own rows there, and would keep its own part of another gradient. Compute it in the model's "
            f"forward, so that the model's call gives it; or from the same rows on all processes (those of "
            f"torch.distributed.all_gather, as a loss of all of them), as a penalty of weights is"
        )


class OutsideGradients:
    """The whole gradients that have been added to those of home parameters on this rank since they were forgotten."""

    def __init__(self) -> None:
        self._nodes: dict[str, Any] = {}
        self._new: dict[str, list[Signed]] = {}
        self._signs: dict[str, Sign] = {}

    def watch(self, homes: Mapping[str, nn.Parameter]) -> None:
        """Watch these, by name, from now on; what is watched already is not watched twice."""
        nodes = {name: get_gradient_edge(home).node for name, home in homes.items() if home.requires_grad}
        for name, node in nodes.items():
            if node is not self._nodes.get(name):
                node.register_prehook(partial(self._see, name))
        self._nodes = nodes

    @property
    def signs(self) -> Mapping[str, Sign]:
        """Return the sign of the sum of each parameter's gradients of this kind."""
        for name, found in self._new.items():
            for one in found:
                self._signs[name] = one.sign.plus(self._signs.get(name))
        self._new = {}
        return self._signs

    def forget(self) -> None:
        """Begin anew."""
        self._new, self._signs = {}, {}

    def _see(self, name: str, gradients: tuple[Any, ...]) -> None:
        for gradient in gradients:
            if gradient is not None and not isinstance(gradient, HomeTensor):
                self._new.setdefault(name, []).append(signed(gradient))
