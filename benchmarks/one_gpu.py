"""One GPU: hetu_fx beside the model itself, eager, compiled, and replayed; without a GPU, small models on the CPU.

A Llama in bf16 and a vision transformer under autocast train with fused AdamW. All contestants stand in one process
and take turns of a few steps, at the end of which the device is waited for: in between the host may run ahead, as in
training. A contestant's memory is the most that its step has at once, with its parameters and states; launches are the
kernels that a step starts, and its attention's kernels must be those that the model itself runs.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

from benchmarks.kit.contest import Step, loss_of, run_rounds
from benchmarks.kit.models import batch, num_parameters
from benchmarks.kit.report import Bar, Row, finish, median_ratio, parser, table
from benchmarks.kit.smallest import compiler, few


@dataclass(frozen=True)
class Pair:
    """What is judged beside what.

    Attributes:
        other, ours: the contestants.
        is_alike: both do the same kernels in the same way, so that launches and memory are to be the same.
    """

    other: str
    ours: str
    is_alike: bool = True


PAIRS = (
    Pair("eager", "hetu_fx"),
    Pair("eager", "hetu_fx, CUDA graphs", is_alike=False),
    Pair("torch.compile", "hetu_fx, compiled"),
    Pair("torch.compile, CUDA graphs", "hetu_fx, compiled, CUDA graphs"),
)

SPEED_BAR = 1.0
MEMORY_BAR = 1.02
ATTENTION = ("flash", "fmha", "sdpa", "attention")
ROUNDS, QUICK_ROUNDS = 20, 5
STEPS = 4
"""Of a turn, on a GPU."""
WARM_UP = 5
"""Steps before anything is measured: CUDA graphs are recorded in the fourth."""
VOCABULARY = 32000


@dataclass(frozen=True)
class Setting:
    """A model and its batch.

    Attributes:
        model: makes it, on the host.
        batch: makes a step's batch, on the host.
        tokens: in a batch; patches of images count as tokens.
        autocast: its products are computed in bf16 for the sake of autocast, and not as its parameters are.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    tokens: int
    autocast: bool


@dataclass(frozen=True)
class Kernels:
    """What a step starts on the device: how often each kernel, by name, and how long all of them run."""

    counts: Counter[str]
    seconds: float


@dataclass(frozen=True)
class Contestant:
    """A step, and the bytes that it has at its peak."""

    step: Step
    peak_bytes: int


def main() -> int:
    """Run every setting and judge it."""
    made = parser("one_gpu", "Steps on one GPU beside eager and torch.compile: speed, memory, launches.")
    made.add_argument("--model", choices=["llama", "vit"], action="append", help="one of them (default: all)")
    others = list(dict.fromkeys(pair.other for pair in PAIRS))
    made.add_argument("--beside", choices=others, action="append", help="one to be compared with (default: all)")
    options = made.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    settings = settings_for(device, options.model or few(["llama", "vit"]))
    wanted = [pair for pair in PAIRS if pair.other in (options.beside or others)]
    pairs = few(pair for pair in wanted if on_gpu or "graphs" not in pair.ours)
    found = [measured(name, settings[name], device, pairs, quick=options.quick) for name in settings]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return finish(
        "one_gpu", [bar for bars, _ in found for bar in bars], [r for _, rows in found for r in rows], gpu=name
    )


def settings_for(device: torch.device, names: Sequence[str]) -> dict[str, Setting]:
    """Return what is measured: large on a GPU, small on the host."""
    large = device.type == "cuda"
    size = {"width": 2048, "layers": 16, "rows": 4, "tokens": 2048} if large else _SMALL_LLAMA
    vit = {"width": 1024, "layers": 24, "rows": 64, "side": 224} if large else _SMALL_VIT
    made = {"llama": llama(**size), "vit": vision(**vit)}
    return {name: made[name] for name in names}


_SMALL_LLAMA = {"width": 256, "layers": 4, "rows": 4, "tokens": 128}
_SMALL_VIT = {"width": 192, "layers": 4, "rows": 4, "side": 64}


def llama(width: int, layers: int, rows: int, tokens: int) -> Setting:
    """Describe a Llama in bf16: 0.9 billion parameters at width 2048 and 16 layers."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    return Setting(
        lambda: LlamaForCausalLM(config).to(torch.bfloat16),
        lambda: batch(rows, tokens, vocabulary=VOCABULARY),
        rows * tokens,
        autocast=False,
    )


def vision(width: int, layers: int, rows: int, side: int) -> Setting:
    """Describe a vision transformer with parameters in fp32, computed under autocast."""
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        image_size=side,
        num_labels=1000,
    )
    drawn = torch.Generator().manual_seed(0)
    images = torch.randn((rows, 3, side, side), generator=drawn)
    labels = torch.randint(0, config.num_labels, (rows,), generator=drawn)
    return Setting(
        lambda: ViTForImageClassification(config),
        lambda: {"pixel_values": images, "labels": labels},
        rows * ((side // config.patch_size) ** 2 + 1),
        autocast=True,
    )


def measured(
    name: str, setting: Setting, device: torch.device, pairs: Sequence[Pair], *, quick: bool
) -> tuple[list[Bar], list[Row]]:
    """Run one setting's contest."""
    names = list(dict.fromkeys(who for pair in pairs for who in (pair.other, pair.ours)))
    contestants = {who: contestant(who, setting, device) for who in names}
    count = STEPS if device.type == "cuda" else 1
    turns = {who: turn(one.step, count, device) for who, one in contestants.items()}
    taken = run_rounds(turns, rounds=QUICK_ROUNDS if quick else ROUNDS, warm_up=1)
    seconds = {who: [one / count for one in values] for who, values in taken.items()}
    kernels = {who: kernels_of(one.step, device) for who, one in contestants.items()}
    own = attention_of(
        kernels["eager"] if "eager" in kernels else kernels_of(step_of("eager", setting, device), device)
    )
    bars = [bar for pair in pairs for bar in bars_of(name, pair, contestants, seconds, kernels, own)]
    with torch.device("meta"):
        parameters = num_parameters(setting.model())
    rows = [
        {
            "model": name,
            "million parameters": parameters / 1e6,
            "who": who,
            "milliseconds a step": statistics.median(seconds[who]) * 1e3,
            "tokens a second": setting.tokens / statistics.median(seconds[who]),
            "peak MB": one.peak_bytes / 1e6,
            "in kernels": kernels[who].seconds * 1e3,
            "launches": kernels[who].counts.total(),
            "of attention": attention_of(kernels[who]).total(),
        }
        for who, one in contestants.items()
    ]
    print(table(rows), *bars, sep="\n", file=sys.stderr, flush=True)  # compiling takes minutes: what is known is known
    return bars, rows


def bars_of(
    name: str,
    pair: Pair,
    contestants: Mapping[str, Contestant],
    seconds: Mapping[str, Sequence[float]],
    kernels: Mapping[str, Kernels],
    own: Counter[str],
) -> list[Bar]:
    """Judge one of ours beside the other; `own` are the kernels of attention that the model itself runs."""
    other, ours = pair.other, pair.ours
    bars = [
        Bar(f"{name}: {ours}, speed over {other}", median_ratio(seconds[other], seconds[ours]), SPEED_BAR, True),
    ]
    if not pair.is_alike:
        return bars
    if contestants[other].peak_bytes:
        memory = contestants[ours].peak_bytes / contestants[other].peak_bytes
        bars.append(Bar(f"{name}: {ours}, peak memory over {other}", memory, MEMORY_BAR, at_least=False))
    if kernels[other].counts:
        launches = kernels[ours].counts.total() / kernels[other].counts.total()
        found = attention_of(kernels[ours])
        unlike = ((found - own) + (own - found)).total()
        if unlike:
            print(f"{name}: {ours} alone has {found - own}, the model itself {own - found}", file=sys.stderr)
        bars.append(Bar(f"{name}: {ours}, launches over {other}", launches, 1.0, at_least=False))
        bars.append(Bar(f"{name}: {ours}, other kernels of attention than the model", unlike, 0, at_least=False))
    return bars


def contestant(who: str, setting: Setting, device: torch.device) -> Contestant:
    """Make one, and run it until its memory is what it will be."""
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = step_of(who, setting, device)
    for _ in range(WARM_UP):
        step()
    if device.type != "cuda":
        return Contestant(step, 0)
    torch.cuda.synchronize(device)
    if "CUDA graphs" not in who:  # theirs is held ever since they were recorded
        torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return Contestant(step, torch.cuda.max_memory_allocated(device) - before)


def step_of(who: str, setting: Setting, device: torch.device) -> Step:
    """Make a contestant's training step: the same loop for all, around a model of its own."""
    import hetu_fx

    torch.manual_seed(0)
    model: Any = setting.model().to(device).train()
    given = {name: value.to(device) for name, value in setting.batch().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if setting.autocast else nullcontext()

    is_compiled, replays = "compile" in who, "CUDA graphs" in who
    if who.startswith("hetu_fx"):
        backend = compiler() if is_compiled else None
        with precision():
            hetu_fx.auto_parallelize(
                model, given, optimizer=optimizer, compile=backend, options=hetu_fx.Options(cuda_graphs=replays)
            )
    elif is_compiled:
        model = torch.compile(model, mode="reduce-overhead" if replays else None)

    def step() -> None:
        optimizer.zero_grad()
        with precision():
            loss = loss_of(model, given)
        loss.backward()
        optimizer.step()

    return step


def turn(step: Step, count: int, device: torch.device) -> Step:
    """Make a turn of so many steps, which ends when the device has done them."""

    def taken() -> None:
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return taken


def kernels_of(step: Step, device: torch.device) -> Kernels:
    """Find the kernels that a step starts; none on the host."""
    if device.type != "cuda":
        return Kernels(Counter(), 0.0)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize(device)
    there = [event for event in record.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    counts = Counter(event.name for event in there if not event.name.startswith(("Memcpy", "Memset")))
    return Kernels(counts, sum(event.device_time_total for event in there) * 1e-6)


def attention_of(kernels: Kernels) -> Counter[str]:
    """Return the kernels of attention."""
    found = {name: count for name, count in kernels.counts.items() if any(word in name.lower() for word in ATTENTION)}
    return Counter(found)


if __name__ == "__main__":
    sys.exit(main())
