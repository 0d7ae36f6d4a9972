"""The families whose ops are aligned, each captured with a batch; and what is known of kernels that are not exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from benchmarks.families.cells import SIZES, in_dtype
from benchmarks.families.families import FAMILIES
from hetu_fx.graph.graph import Graph
from hetu_fx_align.interpret import graph_to_align, values_of_leaves

NAMES = (
    "llama", "gpt2", "bert", "bart", "vit", "net: resnet", "t5", "mixtral", "mamba", "gpt_neox", "opt", "bloom",
    "falcon", "qwen3_moe", "whisper", "wav2vec2", "clip", "swin", "net: unet", "segformer",
)  # fmt: skip
QUICK = NAMES[:3]

EXPLAINED: Mapping[tuple[str, str], str] = {
    ("bf16", "aten.cross_entropy_loss.default"): "torch's CPU kernel adds up the losses of the rows in bf16",
    ("bf16", "aten.layer_norm.default"): "torch's CPU kernel adds up gradients of weight and bias row by row in bf16",
    ("bf16", "aten.conv2d.default"): (
        "oneDNN gives wrong numbers (off by as much as they are) for a channels-last input whose result is one pixel, "
        "on CPUs with avx512_bf16; a contiguous input, or torch.backends.mkldnn off, gives the right ones"
    ),
}
"""Why an op is farther off than what is allowed, by way and op. All others that are count as unexplained."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A family's captured graph, and the values of its leaves in a batch."""

    family: str
    graph: Graph
    leaves: Mapping[fx.Node, Any]


@lru_cache(maxsize=1)
def subject(name: str) -> Subject:
    """Make a family's smallest model in float32, and capture it."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model, batch = family.make().float(), in_dtype(family.batch(*SIZES[0]), torch.float32)
    graph = graph_to_align(model, batch)
    return Subject(name, graph, values_of_leaves(graph, model, batch))
