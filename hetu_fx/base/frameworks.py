"""What frameworks around a model do that the core cannot know: hooks, which `hetu_fx.integrations` and others fill.

An integration is imported when a hook is first asked for, and registers what it knows. Where one answer is wanted, that
of the first framework by name is taken, so that all ranks take the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

ConfigWriter = Callable[[Path], None]


@dataclass(frozen=True)
class WeightNames:
    """What files of weights are called, so that a framework's loaders find them.

    Attributes:
        whole: the file of a model that fits one.
        part: one of several files; {number} counts them from 1, {count} is how many there are.
        index: the JSON file that says which part holds which tensor.
        metadata: what the header of every file says.
    """

    whole: str
    part: str
    index: str
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Launcher:
    """A command that starts the processes of a job.

    Attributes:
        command: what users call it.
        variable: of the environment, set in the processes that it starts.
        two_processes: the command line for two processes without accelerators.
    """

    command: str
    variable: str
    two_processes: str


TORCHRUN = Launcher("torchrun", "TORCHELASTIC_RUN_ID", "torchrun --nproc-per-node 2 SCRIPT")


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What one framework does; what is left out it does not do.

    Attributes:
        name: of the framework; whoever registers it again replaces it.
        adopt: called with a model that runs in parallel from now on.
        tie: makes parameters one that its models read as one, where making them without values has parted them.
        stored_names: gives a model's names of tensors by those, of the names in files, that it has others for.
        config_writer: gives what writes a model's configuration beside its weights; None for models of others.
        torch_optimizer: gives the optimizer of torch's that a wrapper holds; what is no wrapper as it is.
        weights: what files of weights are called.
        labels: inputs of sequences that are left out of the loss where they are -100.
        positions: the argument of models for positions that restart in each sequence.
        paddings: gives what a model's inputs are padded with, by name; 0 where nothing is said.
        launcher: the framework's own.
        own_hooks: beginnings of the names of modules whose hooks are a part of how the framework's models work.
    """

    name: str
    adopt: Callable[[nn.Module], None] = lambda model: None
    tie: Callable[[nn.Module], None] = lambda model: None
    stored_names: Callable[[nn.Module, Collection[str]], Mapping[str, str]] = lambda model, names: {}
    config_writer: Callable[[nn.Module], ConfigWriter | None] = lambda model: None
    torch_optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer
    weights: WeightNames | None = None
    labels: tuple[str, ...] = ()
    positions: str = ""
    paddings: Callable[[nn.Module], Mapping[str, int]] = lambda model: {}
    launcher: Launcher | None = None
    own_hooks: tuple[str, ...] = ()


_known: dict[str, Framework] = {}
_offered: list[str] = []


def register_framework(framework: Framework) -> None:
    """Have `framework` asked wherever its hooks are needed."""
    _known[framework.name] = framework


def offer(*modules: str) -> None:
    """Name modules that register a framework when they are imported; that is when a hook is first asked for."""
    _offered.extend(modules)


def frameworks() -> tuple[Framework, ...]:
    """Return all that are known, by name."""
    while _offered:
        import_module(_offered.pop(0))
    return tuple(_known[name] for name in sorted(_known))


def config_writer(model: nn.Module) -> ConfigWriter | None:
    """Return what writes the model's configuration; None for a model that has none."""
    return next(filter(None, (framework.config_writer(model) for framework in frameworks())), None)


def torch_optimizer(given: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that does the steps, without what frameworks have wrapped it in."""
    for framework in frameworks():
        given = framework.torch_optimizer(given)
    return given


def weight_names() -> WeightNames:
    """Return what files of weights are called."""
    return next(framework.weights for framework in frameworks() if framework.weights)


def label_inputs() -> tuple[str, ...]:
    """Return the inputs that are labels."""
    return next((framework.labels for framework in frameworks() if framework.labels), ())


def position_input() -> str:
    """Return what models call positions that restart in each sequence."""
    return next((framework.positions for framework in frameworks() if framework.positions), "")


def paddings(model: nn.Module) -> dict[str, int]:
    """Return what a model's inputs are padded with, by name, where that is not 0."""
    return {name: value for framework in frameworks() for name, value in framework.paddings(model).items()}


def launchers() -> tuple[Launcher, ...]:
    """Return the commands that start jobs; torch's own comes first."""
    return (TORCHRUN, *(framework.launcher for framework in frameworks() if framework.launcher))
