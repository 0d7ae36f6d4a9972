"""Models of the zoo in float64, with losses in float64 too, for groups that share a sequence."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import Tensor

from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.specialize.device_graph import DeviceGraph
from tests.model_zoo import SAMPLES, to_double
from tests.transforms.plans import program_of, same_in_group

LENGTH = 11


def batch_of(name: str, length: int) -> Mapping[str, Tensor]:
    return to_double(SAMPLES[name].batch(4, length))


class Case:
    """A model in training mode, captured once."""

    def __init__(self, name: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", Tensor.double)
            self.name, self.model = name, SAMPLES[name].model().double().train()
            self.program = program_of(self.model, batch_of(name, LENGTH))

    def same_as_alone(self, plan: Plan, length: int) -> dict[int, DeviceGraph]:
        return same_in_group(self.program, self.model, plan, batch_of(self.name, length), limit=1e-10)
