"""Programs op by op (Zhang et al., HAP): what each op of a model is cut on over all devices of a stage.

A program is a sequence of regions. A region is the ops whose names match a pattern; the first region that matches an op
holds for it. Names are those of `hetu_fx.transforms.layouts.program_choices`. A region says what its ops are cut on, in
which ratios, and how gradients of parameters that its ops read whole are made. Where values lie otherwise than their
readers need them, what moves them is not for the program to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetu_fx.errors import PlanError

ROWS, WHOLE, SUMMANDS = "rows", "whole", "summands"
_UNCUT = (WHOLE, SUMMANDS)
_LEAF_DIM = re.compile(r"(?P<leaf>.+):(?P<dim>\d+)(?:\.(?P<factor>\d+))?")
_WAYS = "give 'rows', 'whole', 'summands', or a dim of a parameter or an input, such as 'mlp.up.weight:0'"


@dataclass(frozen=True, slots=True)
class LeafDim:
    """A dim of the parameters or inputs that match a pattern, or one factor of such a dim, in their order there."""

    leaf: str
    dim: int
    factor: int | None = None

    def __str__(self) -> str:
        return f"{self.leaf}:{self.dim}" + ("" if self.factor is None else f".{self.factor}")


@dataclass(frozen=True, slots=True)
class OpRegion:
    """Some ops of a model, and what they are cut on over the devices of a stage.

    Attributes:
        ops: a pattern of op names (`fnmatch`), such as `layers.*.mlp.up:*`.
        split: what the ops are cut on: "rows" of the batch, or a dim of a parameter or an input (`mlp.up.weight:0`), of
            several factors one (`attn.qkv.weight:0.1`); a pattern of several leaves stands for what each op reaches of
            it. "whole": each device does all. "summands": operands are sums that are spread, and are taken one by one.
        ratios: relative sizes of the parts, one for each device; left out: those of the stage. A device with 0 has no
            part. Kept without common factor.
        factors: gradients of parameters that the ops read whole are made whole on each device, from what they are
            products of, which is gathered (sufficient factors); else they are added up.
    """

    ops: str
    split: str
    ratios: tuple[int, ...] = ()
    factors: bool = False

    def __post_init__(self) -> None:
        if not self.ops:
            raise PlanError("a region has no ops\nhint: give a pattern of op names, '*' for all")
        if self.split not in (ROWS, *_UNCUT) and _LEAF_DIM.fullmatch(self.split) is None:
            raise PlanError(f"{self} has split {self.split!r}\nhint: {_WAYS}")
        object.__setattr__(self, "ratios", self._checked(tuple(self.ratios)))
        if self.factors and not self.is_cut:
            raise PlanError(f"{self} has factors, but its ops are not cut\nhint: leave factors out, or give a split")

    def _checked(self, ratios: tuple[int, ...]) -> tuple[int, ...]:
        if not ratios:
            return ratios
        if not self.is_cut:
            raise PlanError(f"{self} has ratios {list(ratios)}, but its ops are not cut\nhint: leave ratios out")
        if min(ratios) < 0 or not any(ratios):
            raise PlanError(
                f"{self} has ratios {list(ratios)}\n"
                f"hint: give whole numbers from 0, not all of them 0, or leave them out"
            )
        common = math.gcd(*ratios)
        return tuple(ratio // common for ratio in ratios)

    @property
    def is_cut(self) -> bool:
        """Tell whether each device computes a part of what the ops make."""
        return self.split not in _UNCUT

    @property
    def leaf_dim(self) -> LeafDim | None:
        """Return what the ops are cut on, where that is a dim of parameters or inputs."""
        found = _LEAF_DIM.fullmatch(self.split) if self.split not in (ROWS, *_UNCUT) else None
        if found is None:
            return None
        factor = found["factor"]
        return LeafDim(found["leaf"], int(found["dim"]), None if factor is None else int(factor))

    def __str__(self) -> str:
        return f"region {self.ops!r}"


def check_program(regions: Sequence[OpRegion], num_devices: int, what: str) -> None:
    """Raise `PlanError` where ratios are not one for each device."""
    for place, region in enumerate(regions):
        if region.ratios and len(region.ratios) != num_devices:
            raise PlanError(
                f"{what}, program[{place}]: {region} has {len(region.ratios)} ratios {list(region.ratios)} for "
                f"{num_devices} devices\nhint: give one for each, or leave them out for those of the stage"
            )
