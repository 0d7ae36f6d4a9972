"""What submodules make are outputs of a graph where somebody wants to see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetu_fx
from hetu_fx.errors import CaptureError, StateError
from hetu_fx.program.observed import Observers
from tests.program.guarded import Watching


def test_observing_leads_to_another_program_and_removing_back_to_the_first() -> None:
    watching = Watching()
    first = watching.program()
    observation = watching.programs.observers.observe("layer", lambda output: None)
    observed = watching.program()
    assert [leaf.name for leaf in observed.graph.outputs][1] == "observed layer"
    observation.remove()
    observation.remove()
    assert watching.program() is first


def test_all_observers_of_a_module_are_told_and_no_others() -> None:
    seen: list[tuple[str, Any]] = []
    observers = Observers(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    for name in ("0", "0", "1"):
        observers.observe(name, lambda output, name=name: seen.append((name, output)))
    assert observers.names == ("0", "1")
    observers.tell({"0": 5})
    assert seen == [("0", 5), ("0", 5)]


def test_a_submodule_that_is_not_there_or_not_called_is_refused() -> None:
    watching = Watching()
    with pytest.raises(StateError, match="no submodule 'body' to observe\nhint: name one of layer, norm, dropout"):
        watching.programs.observers.observe("body", print)
    watching.model.idle = nn.Linear(1, 1)
    watching.programs.observers.observe("idle", print)
    with pytest.raises(CaptureError, match="module 'idle' is observed, but the forward does not call it"):
        watching.program()


def test_what_is_observed_is_what_the_module_returned_even_if_it_is_written_later() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y.mul_(2.0).sum()

    model: Any = Net()
    hetu_fx.auto_parallelize(model, {"x": torch.ones(4, 3)}, plan=hetu_fx.Plan.single())
    seen: list[Tensor] = []
    model.hetu.observe("layer", seen.append)
    loss = model(torch.ones(4, 3))
    assert not seen[0].requires_grad
    torch.testing.assert_close(seen[0].sum() * 2, loss.detach())


def test_a_module_that_runs_as_it_is_has_hooks_of_its_own() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 1))
    batch = {"input": torch.ones(4, 3)}
    hetu_fx.auto_parallelize(model, batch, plan=hetu_fx.Plan.single(), capture="eager")
    with pytest.raises(StateError, match="with capture='eager' the module itself runs"):
        model.hetu.observe("0", print)
