"""What a caller asks of a search."""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Schedule


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the planner may do.

    micro_batches are the counts to choose from; memory_fraction how much of a device's memory a plan may
    fill; tensor_parallel and pipelines may be switched off (a model that mixes rows cannot be cut into
    micro-batches: give micro_batches=(1,)). With sequence_parallel, tensor parallel groups share the sequence where
    that is predicted to be faster or memory asks for it; off, as what gloo takes for it is not priced yet. With
    recompute, stages recompute as few of their blocks as they must to fit memory. name and max_length are put on the
    plan.
    """

    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    schedule: Schedule = "1f1b"
    zero: int = 1
    memory_fraction: float = 0.9
    tensor_parallel: bool = True
    pipelines: bool = True
    sequence_parallel: bool = False
    recompute: bool = True
    name: str | None = None
    max_length: int | None = None

    @classmethod
    def of_program(cls, *, mixes_rows: bool, name: str | None = None) -> PlanOptions:
        """Return the options for a program; one in which rows meet is not cut into micro-batches or stages."""
        return cls(micro_batches=(1,), pipelines=False, name=name) if mixes_rows else cls(name=name)

    def __post_init__(self) -> None:
        object.__setattr__(self, "micro_batches", tuple(sorted(set(self.micro_batches))))
        if not self.micro_batches or self.micro_batches[0] < 1:
            raise PlanError(f"micro_batches to choose from are {self.micro_batches}; give numbers from 1")
        if not 0 < self.memory_fraction <= 1:
            raise PlanError(f"memory_fraction is {self.memory_fraction}; give a number above 0, up to 1")
