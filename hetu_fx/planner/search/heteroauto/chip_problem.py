"""What HeteroAuto plans for: kinds of chips, a model of equal layers, its batch, and what a plan may do.

No kind need be better than another in everything: one has more memory, another is faster, a third has faster links
("hyper-heterogeneous": H2, arXiv 2505.17548). A stage stands on chips of one kind, in tensor parallel groups that
stay inside a node; every stage has the same number of groups, one for each data parallel replica. H2's planner is
not public: what its paper leaves open is decided here, and each module says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from hetu_fx.base.checks import check_not_negative, check_positive
from hetu_fx.cluster.cluster import Link
from hetu_fx.errors import PlanError
from hetu_fx.planner.values.state import UNSAID, ParameterState
from hetu_fx.plans.plan import SCHEDULES, Schedule


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer and one micro-batch on a tensor parallel group of some size and kind.

    `parameter_bytes` and what is kept for the backward, `kept_bytes`, are those of each chip; `input_bytes` is what
    is kept of a layer that is computed again. Seconds include the group's own communication.
    """

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float = 0.0
    kept_bytes: float = 0.0
    input_bytes: float = 0.0

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        seconds = {name: values.pop(name) for name in ("forward_seconds", "backward_seconds")}
        check_positive(PlanError, "layer", **seconds)
        check_not_negative(PlanError, "layer", **values)


@dataclass(frozen=True, slots=True)
class EndCosts:
    """What stands before all layers, or after them, in layers' worth of seconds, parameters and activations."""

    work: float = 0.0
    parameters: float = 0.0
    kept: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(PlanError, "edge", work=self.work, parameters=self.parameters, kept=self.kept)

    def __add__(self, other: EndCosts) -> EndCosts:
        return EndCosts(self.work + other.work, self.parameters + other.parameters, self.kept + other.kept)


@dataclass(frozen=True, slots=True)
class ChipKind:
    """Chips that are alike.

    Attributes:
        name: told in results; no two kinds of a problem share it.
        nodes: how many of the chips stand on each node.
        memory_bytes: what a plan may fill of each chip.
        layers: a layer by the size of the group, powers of two.
        inside: the link between chips of a node, on which groups work.
        across: the link between nodes of this kind, on which its stages hand over and its replicas sync.
        update_seconds_per_byte: what the optimizer takes for a byte of parameters that a chip updates.
        recomputed_share: how much of a layer's forward is done again where activations are recomputed.
    """

    name: str
    nodes: tuple[int, ...]
    memory_bytes: float
    layers: Mapping[int, Layer] = field(hash=False)
    inside: Link
    across: Link
    update_seconds_per_byte: float = 0.0
    recomputed_share: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "layers", dict(sorted(self.layers.items())))
        where = f"kind {self.name!r}"
        check_positive(
            PlanError, where, memory_bytes=self.memory_bytes, **{"least of nodes": min(self.nodes, default=0)}
        )
        check_not_negative(PlanError, where, update_seconds_per_byte=self.update_seconds_per_byte)
        check_not_negative(PlanError, where, recomputed_share=self.recomputed_share)
        if not self.layers or any(size < 1 or size & (size - 1) for size in self.layers):
            raise PlanError(
                f"{where} has layers for groups of {list(self.layers)}\nhint: give powers of two, such as 1 or 4"
            )

    @property
    def chips(self) -> int:
        """Return how many chips there are."""
        return sum(self.nodes)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the sizes of groups that a node has room for, smallest first."""
        return tuple(size for size in self.layers if size <= max(self.nodes))

    def num_groups(self, degree: int) -> int:
        """Return how many groups of so many chips the nodes have room for."""
        return sum(chips // degree for chips in self.nodes)


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What a plan may do; what is switched off shows what it is worth.

    Attributes:
        uneven_layers: stages may hold different numbers of layers (else they differ by one at most).
        degree_per_kind: kinds may have groups of different sizes.
        split_kinds: one kind may have groups of two sizes (the second level of the search).
        recompute: stages may keep the inputs of their layers only.
        slice_and_gather: stages may hand over in slices that the receivers gather (H2's SR&AG).
    """

    uneven_layers: bool = True
    degree_per_kind: bool = True
    split_kinds: bool = True
    recompute: bool = True
    slice_and_gather: bool = True


@dataclass(frozen=True, slots=True)
class HeteroProblem:
    """Everything that the search reads; equal problems have equal answers.

    Attributes:
        kinds: the chips.
        num_layers: layers of the model, all alike.
        num_micro_batches: micro-batches of a step over all replicas, all alike.
        between: the link between kinds.
        boundary_bytes: what a micro-batch hands over from one layer to the next.
        before, after: what stands before and after all layers.
        replicas: numbers of replicas to choose from; none: all that divide the micro-batches.
        schedule: how many micro-batches are in flight.
        zero: 1 spreads optimizer states over the replicas, 0 keeps them whole.
        bubble: share of a pipeline's filling and draining that is idle: 1 for 1F1B, 0 for a zero-bubble schedule.
        freedom: what a plan may do.
        state: what stands beside parameters.
    """

    kinds: tuple[ChipKind, ...]
    num_layers: int
    num_micro_batches: int
    between: Link
    boundary_bytes: float = 0.0
    before: EndCosts = EndCosts()
    after: EndCosts = EndCosts()
    replicas: tuple[int, ...] = ()
    schedule: Schedule = "1f1b"
    zero: int = 1
    bubble: float = 1.0
    freedom: SearchSpace = SearchSpace()
    state: ParameterState = UNSAID

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))
        names = [kind.name for kind in self.kinds]
        if not names or len(set(names)) < len(names):
            raise PlanError(f"kinds are named {names}\nhint: give one at least, each with a name of its own")
        check_positive(PlanError, "problem", num_layers=self.num_layers, num_micro_batches=self.num_micro_batches)
        check_not_negative(PlanError, "problem", boundary_bytes=self.boundary_bytes)
        if not 0 <= self.bubble <= 1:
            raise PlanError(f"bubble is {self.bubble}\nhint: give 1 (1F1B) to 0 (filling and draining are hidden)")
        if self.schedule not in SCHEDULES or self.zero not in (0, 1):
            raise PlanError(f"schedule {self.schedule!r}, zero {self.zero}\nhint: give one of {SCHEDULES}, and 0 or 1")
        self._check_replicas()

    def _check_replicas(self) -> None:
        given, total = tuple(self.replicas), self.num_micro_batches
        most = max(kind.chips for kind in self.kinds)
        counts = given or tuple(count for count in range(1, min(total, most) + 1) if total % count == 0)
        wrong = [count for count in counts if count < 1 or total % count]
        if wrong:
            raise PlanError(
                f"{total} micro-batches for {wrong} replicas\nhint: give numbers of replicas that divide them"
            )
        object.__setattr__(self, "replicas", tuple(sorted(set(counts))))
