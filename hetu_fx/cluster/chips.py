"""The public figures of accelerators, for clusters that are planned for before anybody has measured them.

Peaks as their makers state them: dense matrix products by element type, memory and its bandwidth. What programs reach
is less, by a factor that differs little between chips of one family; so these are estimates, good for shares between
devices and lower bounds of seconds, and whoever uses them says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from hetu_fx.base.checks import check_positive
from hetu_fx.base.documents import nearest
from hetu_fx.errors import ClusterError

DTYPES = ("bf16", "fp16", "fp32")
"""Element types of products, in the order in which they are preferred for training."""

_GIB = 1 << 30
_TERA = 1e12


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of device.

    Attributes:
        name: how cluster files call it.
        flops_per_second: peak of dense matrix products by element type (of `DTYPES`).
        memory_bytes: what the device has.
        memory_bytes_per_second: peak bandwidth of that memory.
        source: where the figures stand.
        other_names: what torch and others call it.
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    source: str
    other_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        bandwidth = {"memory_bytes_per_second": self.memory_bytes_per_second}
        figures = {**self.flops_per_second, "memory_bytes": self.memory_bytes, **bandwidth}
        check_positive(ClusterError, f"chip {self.name}", **figures)
        if not self.flops_per_second.keys() <= set(DTYPES):
            raise ClusterError(f"chip {self.name} has speeds for {list(self.flops_per_second)}\nhint: give {DTYPES}")

    def flops(self, dtype: str | None = None) -> float:
        """Return the peak for an element type; None: the first of `DTYPES` that it multiplies."""
        if dtype is None:
            return next(self.flops_per_second[known] for known in DTYPES if known in self.flops_per_second)
        if dtype not in self.flops_per_second:
            known = ", ".join(self.flops_per_second)
            raise ClusterError(f"chip {self.name} has no figure for dtype {dtype!r}\nhint: give one of {known}")
        return self.flops_per_second[dtype]


@cache
def find_chip(kind: str) -> Chip | None:
    """Return the chip of a name, in any case and with spaces, dashes or underscores; None for one that is not known."""
    return _BY_NAME.get(_plain(kind))


def chip_text(kind: str) -> str:
    """Return a kind with the chip whose figures it has where the name leaves that open: `A100 (as A100-80G)`."""
    chip = find_chip(kind)
    is_short = chip is not None and chip.name.partition("-")[0].lower() == kind.lower() != chip.name.lower()
    return f"{kind} (as {chip.name})" if chip is not None and is_short else kind


def unknown_chip(kind: str) -> str:
    """Return the part of a message that says that a kind has no public figures here, with the nearest that has."""
    return f"kind {kind!r} is not in the table of public figures{nearest(kind, tuple(chip.name for chip in CHIPS))}"


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _chip(
    name: str,
    gib: int,
    gigabytes_per_second: float,
    source: str,
    *other_names: str,
    **tera: float,
) -> Chip:
    speeds = {dtype: value * _TERA for dtype, value in tera.items()}
    return Chip(name, speeds, gib * _GIB, gigabytes_per_second * 1e9, source, other_names)


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper (products summed in fp32)"
_ADA = "NVIDIA Ada GPU architecture whitepaper (products summed in fp32)"
_RTX = "NVIDIA RTX Blackwell GPU architecture whitepaper (products summed in fp32)"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (half of the figures with sparsity)"
_L4 = "NVIDIA L4 datasheet (half of the figures with sparsity)"
_B200 = "NVIDIA DGX B200 datasheet (half of the figures with sparsity, an eighth of the node)"
_MI250 = "AMD Instinct MI250 datasheet (half of it: each of its two dies is a device)"
_GAUDI = "Intel Gaudi 3 AI accelerator whitepaper"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"

CHIPS = (
    _chip("P100-16G", 16, 732, "NVIDIA Tesla P100 datasheet", "Tesla P100-SXM2-16GB", fp16=21.2, fp32=10.6),
    _chip("V100-16G", 16, 900, _V100, "Tesla V100-SXM2-16GB", fp16=125, fp32=15.7),
    _chip("V100-32G", 32, 900, _V100, "Tesla V100-SXM2-32GB", "V100", fp16=125, fp32=15.7),
    _chip("T4", 16, 320, "NVIDIA Turing architecture whitepaper", "Tesla T4", fp16=65, fp32=8.1),
    _chip("A100-40G", 40, 1555, _A100, "NVIDIA A100-SXM4-40GB", bf16=312, fp16=312, fp32=19.5),
    _chip("A100-80G", 80, 2039, _A100, "NVIDIA A100-SXM4-80GB", "A100", bf16=312, fp16=312, fp32=19.5),
    _chip("A800-80G", 80, 2039, _A100, "NVIDIA A800-SXM4-80GB", "A800", bf16=312, fp16=312, fp32=19.5),
    _chip("A30", 24, 933, "NVIDIA A30 datasheet", "NVIDIA A30", bf16=165, fp16=165, fp32=10.3),
    _chip("A10", 24, 600, "NVIDIA A10 datasheet", "NVIDIA A10", bf16=125, fp16=125, fp32=31.2),
    _chip("A6000", 48, 768, _GA102, "NVIDIA RTX A6000", "RTX A6000", bf16=154.8, fp16=154.8, fp32=38.7),
    _chip("RTX 3090", 24, 936, _GA102, "NVIDIA GeForce RTX 3090", "3090", bf16=71, fp16=71, fp32=35.6),
    _chip("RTX 4090", 24, 1008, _ADA, "NVIDIA GeForce RTX 4090", "4090", bf16=165.2, fp16=165.2, fp32=82.6),
    _chip("RTX 5090", 32, 1792, _RTX, "NVIDIA GeForce RTX 5090", "5090", bf16=209.5, fp16=209.5, fp32=104.8),
    _chip("L4", 24, 300, _L4, "NVIDIA L4", bf16=121, fp16=121, fp32=30.3),
    _chip("L40S", 48, 864, "NVIDIA L40S datasheet", "NVIDIA L40S", bf16=362, fp16=362, fp32=91.6),
    _chip("H100-80G", 80, 3350, _H100, "NVIDIA H100 80GB HBM3", "H100", bf16=989, fp16=989, fp32=67),
    _chip("H800-80G", 80, 3350, _H100, "NVIDIA H800", "H800", bf16=989, fp16=989, fp32=67),
    _chip("H200-141G", 141, 4800, "NVIDIA H200 datasheet", "NVIDIA H200", "H200", bf16=989, fp16=989, fp32=67),
    _chip("H20-96G", 96, 4000, "NVIDIA H20 specification", "NVIDIA H20", "H20", bf16=148, fp16=148, fp32=44),
    _chip("B200", 180, 8000, _B200, "NVIDIA B200", bf16=2250, fp16=2250, fp32=75),
    _chip("MI250", 64, 1638, _MI250, "AMD Instinct MI250", bf16=181, fp16=181, fp32=45.3),
    _chip("MI300X", 192, 5300, "AMD Instinct MI300X datasheet", "AMD Instinct MI300X", bf16=1307, fp16=1307, fp32=163),
    _chip("Gaudi 3", 128, 3700, _GAUDI, "Intel Gaudi 3", bf16=1835, fp16=459, fp32=229),
)
"""The table, by family and age."""

_BY_NAME = {_plain(name): chip for chip in CHIPS for name in (chip.name, *chip.other_names)}
