"""What the demo does: sizes of model and batches, speeds of the devices, what happens at which step."""

from __future__ import annotations

from dataclasses import dataclass

from hetu_fx.errors import EnvironmentProblem

CHECKPOINT = "checkpoint"
"""The folder that the ranks save to, in that of the demo."""

USED_SHARE = 0.95
"""Of the cores there are; an emulation leaves some free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Everything that the demo decides beforehand; what it measures is not here.

    Attributes:
        speeds: cores of each device.
        slowed_rank: the device that becomes slower, to `slowed_speed` cores, before step `slow_at`.
        width, layers, heads, key_value_heads, feed_forward: of the model.
        rows, length: of a usual batch, over all ranks.
        long_rows, long_length: of a batch of long sequences; it comes at the steps `long_at`.
        steps: training steps, numbered from 0.
        compared_steps: steps of the data-parallel comparison, for each state of the devices.
    """

    speeds: tuple[float, ...] = (0.8, 0.4, 0.2, 0.2)
    slowed_rank: int = 1
    slowed_speed: float = 0.15
    width: int
    layers: int
    heads: int
    key_value_heads: int = 4
    feed_forward: int
    rows: int = 16
    length: int
    long_rows: int = 4
    long_length: int
    long_at: tuple[int, ...]
    slow_at: int
    steps: int = 24
    compared_steps: int
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        world = len(self.speeds)
        if self.rows % world or self.long_rows % world:
            raise EnvironmentProblem(
                f"batches of {self.rows} and {self.long_rows} rows cannot be shared evenly by {world} ranks"
            )
        if not 0 < self.slow_at < self.steps or not all(0 <= at < self.steps for at in self.long_at):
            raise EnvironmentProblem(
                f"slow_at {self.slow_at} and long_at {self.long_at} must be steps from 0 to {self.steps - 1}"
            )

    @property
    def world_size(self) -> int:
        """Return the number of devices."""
        return len(self.speeds)

    def equal_speeds(self, num_cores: float) -> tuple[float, ...]:
        """Return nearly all cores in equal shares: for starting, where speed is not the subject."""
        return (min(1.0, USED_SHARE * num_cores / self.world_size),) * self.world_size

    def shape(self, step: int) -> tuple[int, int]:
        """Return (rows, length) of a step's global batch."""
        return (self.long_rows, self.long_length) if step in self.long_at else (self.rows, self.length)

    def is_slowed(self, step: int) -> bool:
        """Tell whether a device is slowed down by this step."""
        return step >= self.slow_at


FULL = DemoSettings(
    width=384,
    layers=5,
    heads=12,
    feed_forward=1280,
    length=128,
    long_length=512,
    long_at=(3,),
    slow_at=8,
    steps=20,
    compared_steps=1,
)

QUICK = DemoSettings(
    width=128,
    layers=4,
    heads=4,
    feed_forward=256,
    length=64,
    long_length=256,
    long_at=(7,),
    slow_at=12,
    compared_steps=3,
)


def settings_for(*, quick: bool) -> DemoSettings:
    """Return the settings of the demo, or of its smaller version."""
    return QUICK if quick else FULL
