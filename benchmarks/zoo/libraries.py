"""The libraries whose models are tried: where each has its families, and what it needs to be installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.families.family import Family


@dataclass(frozen=True, slots=True)
class Library:
    """A library of models.

    Fields:
        distribution: what pip calls it.
        modules: what it and its models import.
        families: the module here that has its families.
    """

    distribution: str
    modules: Sequence[str]
    families: str

    @property
    def missing(self) -> list[str]:
        """What of it is not installed."""
        return [module for module in self.modules if find_spec(module) is None]

    @property
    def version(self) -> str:
        return version(self.distribution)

    def made(self) -> Sequence[Family]:
        """Import the library, and return its families."""
        if find_spec("torchvision") is not None:  # which transformers imports too, and with it most others
            _declare_ops_of_torchvision()
        found: Sequence[Family] = import_module(f"benchmarks.zoo.{self.families}").FAMILIES
        return found


LIBRARIES: Mapping[str, Library] = {
    "timm": Library("timm", ("timm", "torchvision"), "of_timm"),
    "torchvision": Library("torchvision", ("torchvision",), "of_torchvision"),
    "diffusers": Library("diffusers", ("diffusers",), "of_diffusers"),
    "segmentation_models": Library(
        "segmentation_models_pytorch", ("segmentation_models_pytorch", "timm", "torchvision"), "of_segmentation_models"
    ),
    "monai": Library("monai", ("monai",), "of_monai"),
    "x-transformers": Library("x-transformers", ("x_transformers",), "of_x_transformers"),
    "neuraloperator": Library("neuraloperator", ("neuralop",), "of_neuraloperator"),
    "PyG": Library("torch_geometric", ("torch_geometric",), "of_pyg"),
    "metric losses": Library("pytorch-metric-learning", ("pytorch_metric_learning",), "of_metric_learning"),
}

OPS_OF_TORCHVISION = ("nms", "qnms")
_declared: list[torch.library.Library] = []  # what declares ops takes them back when it is dropped


def _declare_ops_of_torchvision() -> None:
    """Declare the ops that torchvision describes when it is imported, where its own library of them does not load.

    So it is with a build for CUDA beside a torch for the CPU. Models that call these ops fail then.
    """
    if _declared or _loads_library_of_torchvision():
        return
    _declared.append(torch.library.Library("torchvision", "DEF"))
    for name in OPS_OF_TORCHVISION:
        _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _loads_library_of_torchvision() -> bool:
    spec = find_spec("torchvision")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    files = [file for folder in folders for file in Path(folder).glob("_C*.so")]
    try:
        for file in files:
            torch.ops.load_library(file)
    except OSError:
        return False
    return bool(files)
