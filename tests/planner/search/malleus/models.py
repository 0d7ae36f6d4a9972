"""Small situations that the tests of the Malleus search share; layer seconds are relative."""

from benchmarks.cases.published_malleus import nodes_of
from hetu_fx.planner.search.malleus.device_groups import GroupKind
from hetu_fx.planner.search.malleus.situation import MalleusSituation


def kinds(*seconds: float, size: int = 1, room: float = float("inf")) -> tuple[GroupKind, ...]:
    """Return kinds of groups, slowest first."""
    return tuple(sorted((GroupKind(y, size, room) for y in seconds), reverse=True))


def ample(layers: int, micro_batches: int, pipelines: int, devices: int = 4) -> MalleusSituation:
    """Return a situation with ample memory and groups of one device."""
    return MalleusSituation(nodes_of(devices, devices), layers, micro_batches, pipelines, {1: 1.0})
