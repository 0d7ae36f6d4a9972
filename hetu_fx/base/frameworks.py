"""What frameworks around a model do that the core cannot know: hooks, which `hetu_fx.integrations` and others fill.

An integration is imported when a hook is first asked for, and registers what it knows. Where one answer is wanted, that
of the first framework by name is taken, so that all ranks take the same.

Modules of ours are imported once a library is there, and not before: importing hetu_fx loads no library. Nor is one
loaded to tell its version: of libraries newer than those that the tests have passed with, users are told.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hetu_fx.base.patches import Hook, add_patch

if TYPE_CHECKING:
    import torch
    from torch import nn


NEWEST = {"torch": "2.14"}


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def above_tested(library: str, version: str) -> str:
    """Return the newest tested version of a library where this one is of a later release; "" otherwise."""
    newest = NEWEST.get(library, "")
    tested = numbers(newest)
    return newest if tested and numbers(version)[: len(tested)] > tested else ""


def upper_bound(newest: str) -> str:
    """Return the first release that is no longer of the newest tested one: 2.15 for 2.14."""
    *before, last = numbers(newest)
    return ".".join(map(str, (*before, last + 1)))


def warn_of_newer() -> None:
    """Warn, on rank 0 alone, of installed libraries above the newest tested version."""
    if os.environ.get("RANK", "0") != "0":
        return
    for library in NEWEST:
        try:
            version = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
        if newest := above_tested(library, version):
            warnings.warn(
                f"hetu_fx was tested with {library} up to {newest}, and {version} is installed\n"
                f"hint: if something fails that should not, pip install '{library}<{upper_bound(newest)}'",
                stacklevel=3,
            )


def import_with_library(library: str, module: str, *, why: str, tested: str) -> None:
    """Import `module` as soon as `library` has been imported; at once, where it has been already.

    It is in the table of patches until then, as one of the package that the library is in.
    """
    package = library.partition(".")[0]
    add_patch(Hook(package, "sys", "meta_path", why, tested, partial(_Finder.put_in, library, module)))


class _Finder(MetaPathFinder):
    """Finds the library where it is, and has a module of ours imported after it."""

    def __init__(self, library: str, module: str) -> None:
        self.library, self.module = library, module

    @classmethod
    def put_in(cls, library: str, module: str) -> _Finder:
        """Import the module where the library is there, else have Python ask a finder for that."""
        made = cls(library, module)
        if library in sys.modules:
            import_module(module)
        else:
            sys.meta_path.insert(0, made)
        return made

    def remove(self) -> None:
        """Be asked no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.library or self not in sys.meta_path:
            return None
        self.remove()
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.module)
        return spec


class _Then(Loader):
    """Loads a library as its own loader does, and imports a module of ours."""

    def __init__(self, loader: Loader, module: str) -> None:
        self.loader, self.module = loader, module

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the library for its files later finds its own loader.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        import_module(self.module)


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


class _Frameworks:
    """The frameworks that are registered, by name, and the modules that register others when they are asked for."""

    def __init__(self) -> None:
        self.known: dict[str, Framework] = {}
        self.offered: list[str] = []


_frameworks = _Frameworks()


def register_framework(framework: Framework) -> None:
    """Have `framework` asked wherever its hooks are needed."""
    _frameworks.known[framework.name] = framework


def offer(*modules: str) -> None:
    """Name modules that register a framework when they are imported; that is when a hook is first asked for."""
    _frameworks.offered.extend(modules)


def frameworks() -> tuple[Framework, ...]:
    """Return all that are known, by name."""
    while _frameworks.offered:
        import_module(_frameworks.offered.pop(0))
    return tuple(_frameworks.known[name] for name in sorted(_frameworks.known))


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
