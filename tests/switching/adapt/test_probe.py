import pytest
import torch

from hetu_fx.switching.adapt.health import Probe


class Ticks:
    """A clock that goes on by half a second whenever it is read."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 0.5
        return self.time

    def seconds(self, start: float, end: float) -> float:
        return end - start


@pytest.mark.parametrize(("budget", "products"), [(0.0, 4), (0.5, 4), (0.6, 8), (2.0, 16)])
def test_a_probe_runs_for_its_budget_and_tells_the_seconds_of_one_product(budget: float, products: int) -> None:
    clock = Ticks()
    assert Probe(torch.device("cpu"), clock).seconds(budget) == (clock.time - 0.5) / products


def test_a_probe_keeps_nothing_for_backward() -> None:
    probe = Probe(torch.device("cpu"), Ticks())
    probe.seconds(0.0)
    assert probe._operand is not None
    assert not probe._operand.requires_grad
