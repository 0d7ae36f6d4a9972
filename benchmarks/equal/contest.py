"""Contestants that train the same rows on equal processes: their times in turns, and the memory of each."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from benchmarks.kit.contest import Step, loss_of, run_rounds
from benchmarks.kit.fleet import say
from benchmarks.kit.memory import Recorded, measured_step, recording
from benchmarks.kit.report import Bar, Row, median_ratio
from benchmarks.kit.smallest import least

PHASES = "forward", "backward", "optimizer"
PEAKS = 2  # of so many, the least counts


@dataclass(frozen=True)
class Job:
    """A contestant at work: its step, and the tensors that it keeps, by what they are."""

    step: Step
    kept: Callable[[], Mapping[str, Iterable[Tensor]]] = dict


Maker = Callable[[], Job]


@dataclass(frozen=True)
class Against:
    """A bar: the best of some of our contestants over one of torch's, in time and, where it is asked, in memory."""

    ours: tuple[str, ...]
    theirs: str
    most_time: float
    most_memory: float | None = None


@dataclass(frozen=True)
class Contest:
    """Contestants of one setting, and what is asked of them."""

    contestants: Mapping[str, Maker]
    bars: Sequence[Against]


@dataclass(frozen=True)
class Found:
    """What was found of a contest: by contestant the seconds of each round, and the peak and what it consists of."""

    seconds: Mapping[str, list[float]]
    peaks: Mapping[str, Mapping[str, int]]

    def ratio(self, ours: str, theirs: str) -> float:
        """Return our time over theirs."""
        return median_ratio(self.seconds[ours], self.seconds[theirs])

    def memory_ratio(self, ours: str, theirs: str) -> float:
        """Return our peak over theirs."""
        return sum(self.peaks[ours].values()) / sum(self.peaks[theirs].values())

    def bars(self, setting: str, contest: Contest) -> list[Bar]:
        """Judge."""
        made = []
        for against in contest.bars:
            name, theirs = f"{setting}: {' or '.join(against.ours)} over {against.theirs}", against.theirs
            if self.seconds:
                best = min(self.ratio(ours, theirs) for ours in against.ours)
                made.append(Bar(f"{name}, time", best, against.most_time, at_least=False))
            if against.most_memory is not None:
                least = min(self.memory_ratio(ours, theirs) for ours in against.ours)
                made.append(Bar(f"{name}, peak memory", least, against.most_memory, at_least=False))
        return made

    def rows(self, setting: str, contest: Contest) -> list[Row]:
        """Make a line of each contestant; the first one that bars name is what others are compared with."""
        theirs = contest.bars[0].theirs
        return [self._row(setting, name, theirs) for name in contest.contestants]

    def _row(self, setting: str, name: str, theirs: str) -> Row:
        row: dict[str, object] = {"setting": setting, "who": name}
        if self.seconds:
            pairs = zip(self.seconds[name], self.seconds[theirs], strict=True)
            first, _, last = quantiles((own / other for own, other in pairs), n=4)
            row |= {"ms a step": median(self.seconds[name]) * 1e3, f"over {theirs}": self.ratio(name, theirs)}
            row |= {"quartiles": f"{first:.3f} to {last:.3f}"}
        peak = self.peaks[name]
        return (
            row | {"peak MB": sum(peak.values()) / 1e6, "of theirs": self.memory_ratio(name, theirs)} | _megabytes(peak)
        )


def _megabytes(parts: Mapping[str, int]) -> dict[str, object]:
    return {f"{part}, MB": size / 1e6 for part, size in parts.items() if size}


def run(contest: Contest, *, rounds: int) -> Found:
    """Measure the memory of each contestant alone, and time all in turns (no rounds: do not); collective."""
    peaks = {name: least_peak(name, make) for name, make in contest.contestants.items()}
    if rounds == 0:
        return Found({}, peaks)
    return Found(run_rounds({n: make().step for n, make in contest.contestants.items()}, rounds=rounds), peaks)


def least_peak(name: str, make: Maker) -> Mapping[str, int]:
    """Return the least of some peaks of the rank that has the most, and what it consists of; collective."""
    say(f"memory of {name}")
    found = min((peak_of(make) for _ in range(least(PEAKS, 1))), key=lambda parts: sum(parts.values()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return max(everyone, key=lambda parts: sum(parts.values()))  # type: ignore[no-any-return]


def peak_of(make: Maker) -> Mapping[str, int]:
    """Return what is out at the most in a step, from before the model was made; collective."""
    gc.collect()
    with recording() as record:
        job = make()
        job.step()
        job.step()
        gc.collect()
        with measured_step():
            job.step()
        kept = job.kept()
    return Recorded.of(record).at_peak(kept, PHASES)


def marked_step(model: nn.Module, optimizer: Any, batch: Mapping[str, Tensor]) -> Step:
    """Make one step of the ordinary loop, which marks its phases."""

    def step() -> None:
        optimizer.zero_grad()
        with record_function("forward"):
            loss = loss_of(model, batch)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()

    return step


def kept_by(model: nn.Module, optimizer: Any) -> dict[str, list[Tensor]]:
    """Return this rank's parts of what a step leaves behind, by what they are."""
    parameters = list(model.parameters())
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    groups = {"parameters": parameters, "gradients": gradients, "optimizer's state": states}
    return {what: [local_of(tensor) for tensor in tensors] for what, tensors in groups.items()}


def local_of(tensor: Any) -> Tensor:
    """Return this rank's part of a distributed tensor, as it is."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()
