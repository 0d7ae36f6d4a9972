"""The bridge on paper: which boxes of which parameters travel in which message, and in what order.

A parameter's transition is cut in finest slices, and `comm_ops.plans.routes` says by which collective each gets
home or to its readers. Slices with the same ranks travel in one flat message. What has no route is *moved* by
batched send-receive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from hetu_fx.annotations.annotation import Annotation, Duplicate
from hetu_fx.annotations.region import Box
from hetu_fx.comm_ops.plans.cost import BUCKET_BYTES
from hetu_fx.comm_ops.plans.routes import Route, RouteKind, find_routes
from hetu_fx.comm_ops.plans.slices import Slice, finest_slices
from hetu_fx.comm_ops.plans.transition import Transition
from hetu_fx.errors import AnnotationError, StateError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BridgeEntry:
    """One parameter: where its home is, where the graph reads it, and how its gradient lies there.

    `gradient` is `compute` with some copies turned into summands. `dtype` is that of the compute parameter
    and of its gradient. Parameters of one `unit` travel together, and with no others; entries are in order of units.
    What is not `trained` has no gradient that would travel.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    home: Annotation
    compute: Annotation
    gradient: Annotation
    unit: int = 0
    trained: bool = True

    def __post_init__(self) -> None:
        if self.home.has_partial or self.compute.has_partial:
            raise AnnotationError(
                f"parameter {self.name!r} cannot have summands at home ({self.home}) or where it is read "
                f"({self.compute}); only its gradient can"
            )


@dataclass(frozen=True, order=True, slots=True)
class BridgeLane:
    """Who talks how; parts of equal lanes share a message. `givers` of `ranks` hold summands that count."""

    kind: RouteKind
    ranks: tuple[int, ...]
    givers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterBox:
    """One box (global index space) of one parameter; `owner` gets its sum, or has its value."""

    name: str
    box: Box
    owner: int | None

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.box.numel


@dataclass(frozen=True, slots=True)
class Message:
    """Parts that travel together: one segment, or for scatter and gather one per rank of the lane."""

    lane: BridgeLane
    segments: tuple[tuple[ParameterBox, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of every segment."""
        return tuple(sum(part.numel for part in segment) for segment in self.segments)


@dataclass(frozen=True, slots=True)
class BridgeBucket:
    """Parameters of a unit that are brought over together; `moved` names those that go by batched send-receive."""

    names: tuple[str, ...]
    dtype: torch.dtype
    messages: tuple[Message, ...]
    moved: tuple[str, ...]
    unit: int = 0


@dataclass(frozen=True, slots=True)
class BridgePlan:
    """All buckets both ways, in the order in which every rank must start them.

    `gathers` follow the order of the entries, `reduces` the reverse, in which gradients become ready.
    """

    entries: tuple[BridgeEntry, ...]
    gathers: tuple[BridgeBucket, ...]
    reduces: tuple[BridgeBucket, ...]


def plan_bridge(entries: Sequence[BridgeEntry], bucket_bytes: int = BUCKET_BYTES) -> BridgePlan:
    """Plan both directions; a pure function, the same on every rank. Raises StateError for a name twice."""
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise StateError(f"parameters {twice} stand in the bridge more than once")
    return BridgePlan(
        tuple(entries),
        _buckets(entries, lambda e: _gather_routes(e.home, e.compute, e.shape), bucket_bytes),
        _buckets(
            [e for e in entries[::-1] if e.trained], lambda e: _reduce_routes(e.gradient, e.home, e.shape), bucket_bytes
        ),
    )


def taken_once(gradient: Annotation, home: Annotation, shape: Shape) -> Annotation:
    """Return where a gradient is taken from, of which each replica may have the whole: one, if several own an element.

    What replicas compute differs by rounding, and copies that are each updated by its own would drift apart.
    """
    if not isinstance(gradient.top, Duplicate):
        return gradient
    owned = sum(math.prod(home.region(rank, shape).local_shape) for rank in home.ranks)
    return Annotation(gradient.groups[:1], gradient.shardings[:1]) if owned > math.prod(shape) else gradient


Routes = tuple[tuple[BridgeLane, Slice, int | None], ...] | None
"""The lane of every slice that travels, and who owns it there; None: to be moved."""


@lru_cache(maxsize=4096)
def _gather_routes(home: Annotation, compute: Annotation, shape: Shape) -> Routes:
    """Say how every slice that is not read by its owners alone comes to its readers."""
    routes = _routes(Transition(home, compute, shape))
    # Each owner has its own segment, so that it does not matter whose a lane is.
    return None if routes is None else tuple((replace(lane, givers=()), part, owner) for lane, part, owner in routes)


@lru_cache(maxsize=4096)
def _reduce_routes(gradient: Annotation, home: Annotation, shape: Shape) -> Routes:
    """Say how every slice whose value is a sum over ranks is summed; what would have to be gathered is moved."""
    routes = _routes(Transition(gradient, home, shape))
    is_summed = routes is not None and all(lane.kind is not RouteKind.GATHER for lane, _, _ in routes)
    return routes if is_summed else None


def _routes(transition: Transition) -> Routes:
    found: list[tuple[BridgeLane, Slice, int | None]] = []
    for part in finest_slices(transition):
        routes = find_routes(part)
        if routes is None:
            return None
        found += [(lane, part, owner) for route in routes for lane, owner in _lanes(route)]
    return tuple(found)


def _lanes(route: Route) -> list[tuple[BridgeLane, int | None]]:
    """List the lanes of a route by ranks, each with the one that has the value or gets the sum."""
    owners = {tuple(sorted(ranks)): None if route.home is None else ranks[route.home] for ranks in route.columns()}
    return [(BridgeLane(route.kind, ranks, route.givers or ranks), owners[ranks]) for ranks in sorted(owners)]


def _buckets(
    entries: Sequence[BridgeEntry], routes_of: Callable[[BridgeEntry], Routes], bucket_bytes: int
) -> tuple[BridgeBucket, ...]:
    """Group parameters of a unit that use the same lanes, in order of first appearance, and cut groups by size."""
    groups: dict[object, list[BridgeEntry]] = {}
    for entry in entries:
        routes = routes_of(entry)
        lanes = None if routes is None else tuple(sorted({lane for lane, _, _ in routes}))
        groups.setdefault((entry.unit, entry.dtype, lanes), []).append(entry)
    return tuple(_bucket(part, routes_of) for group in groups.values() for part in _cut_by_size(group, bucket_bytes))


def _cut_by_size(entries: Sequence[BridgeEntry], bucket_bytes: int) -> Iterator[list[BridgeEntry]]:
    bucket: list[BridgeEntry] = []
    filled = 0
    for entry in entries:
        size = math.prod(entry.shape) * entry.dtype.itemsize
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(entry)
        filled += size
    if bucket:
        yield bucket


def _bucket(entries: Sequence[BridgeEntry], routes_of: Callable[[BridgeEntry], Routes]) -> BridgeBucket:
    parts: dict[BridgeLane, list[ParameterBox]] = {}
    moved = []
    for entry in entries:
        routes = routes_of(entry)
        if routes is None:
            moved.append(entry.name)
            continue
        for lane, piece, owner in routes:
            parts.setdefault(lane, []).extend(ParameterBox(entry.name, box, owner) for box in slice_boxes(piece))
    messages = tuple(_message(lane, parts[lane]) for lane in sorted(parts))
    names = tuple(entry.name for entry in entries)
    return BridgeBucket(names, entries[0].dtype, messages, tuple(moved), entries[0].unit)


def slice_boxes(piece: Slice) -> tuple[Box, ...]:
    """List the boxes of a slice, in row-major order."""
    return tuple(Box(bounds) for bounds in itertools.product(*piece.dims))


def _message(lane: BridgeLane, parts: Sequence[ParameterBox]) -> Message:
    if lane.kind is RouteKind.SUM:
        return Message(lane, (tuple(parts),))
    by_owner: Mapping[int, list[ParameterBox]] = {rank: [] for rank in lane.ranks}
    for part in parts:
        if part.owner is not None:
            by_owner[part.owner].append(part)
    return Message(lane, tuple(tuple(by_owner[rank]) for rank in lane.ranks))
