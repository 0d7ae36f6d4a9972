"""Small situations that the tests of the Malleus search share; layer seconds are relative."""

from benchmarks.published_malleus import nodes_of
from hetu_fx.planner.search.malleus.groups import Kind
from hetu_fx.planner.search.malleus.situation import Situation


def kinds(*seconds: float, size: int = 1, room: float = float("inf")) -> tuple[Kind, ...]:
    """Return kinds of groups, slowest first."""
    return tuple(sorted((Kind(y, size, room) for y in seconds), reverse=True))


def ample(layers: int, micro_batches: int, pipelines: int, devices: int = 4) -> Situation:
    """Return a situation with ample memory and groups of one device."""
    return Situation(nodes_of(devices, devices), layers, micro_batches, pipelines, {1: 1.0})
