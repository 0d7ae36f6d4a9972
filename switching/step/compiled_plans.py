"""A plan made ready to run as graphs: device graphs of its compute layout, and the bridge to the parameters' home."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, fx, nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.local import local_part
from hetu_fx.base.device_types import HOST, device_type_record
from hetu_fx.base.once import once
from hetu_fx.base.user_warnings import warn_user
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.resolve.lowering import Lowering
from hetu_fx.comm_ops.wire.consensus import broadcast_from_rank0, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.graph import meta
from hetu_fx.graph.graph import LeafKind, OutputKind
from hetu_fx.planner.gathered_ops import gathered_ops
from hetu_fx.planner.values.gathered_op import KINDS, GatheredOp
from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program, deduce_program
from hetu_fx.switching.bridge.bridge import Bridge, BridgeEntry
from hetu_fx.switching.bridge.bridge_plan import taken_once
from hetu_fx.switching.bridge.compute import Compute, bytes_besides
from hetu_fx.switching.home.ops import get_home_layout, own_pieces
from hetu_fx.switching.step.engine import Chunk, Engine
from hetu_fx.switching.step.stage_p2p import Ends, StageP2P
from hetu_fx.switching.step.unit_buffers import UnitBuffers
from hetu_fx.switching.step.unit_walk import UnitWalk
from hetu_fx.switching.step.used import GraphUse
from hetu_fx.switching.step.variant import Variant
from hetu_fx.transforms.layouts.annotated_graph import AnnotatedGraph, StageLayout
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.serialize import deserialize, serialize
from hetu_fx.transforms.layouts.states import Summed
from hetu_fx.transforms.lowering.block_modules import BlockModules
from hetu_fx.transforms.lowering.choose_algorithms import ChooseAlgorithms
from hetu_fx.transforms.lowering.lower import lower
from hetu_fx.transforms.lowering.overlap_products import Overlap
from hetu_fx.transforms.lowering.recompute import Recompute
from hetu_fx.transforms.lowering.recomputing_module import RecomputingModule
from hetu_fx.transforms.lowering.replay import RecordedCalls, hindrance
from hetu_fx.transforms.lowering.units import UNITS, UnitPlan, Units, plan_units
from hetu_fx.transforms.lowering.weights_later import WeightsLater
from hetu_fx.transforms.passes import run_pass
from hetu_fx.transforms.rewrites.counter_rng import draws_by_token
from hetu_fx.transforms.specialize.casts import check_computes
from hetu_fx.transforms.specialize.device_graph import FIXED_PLACES, FIXED_SIZES, DeviceGraph, SlotKind
from hetu_fx.transforms.specialize.place import Place
from hetu_fx.transforms.specialize.specialize import Specialize

NODE_BYTES = 2_700
"""What a graph that runs as it is takes per node of its own: 2.5 to 2.8 kB, measured for decoders of 4 to 9 blocks."""

StageKey = tuple[bool, bool]
"""How a program is run: whether other values than the loss are wanted, and whether it splits into micro-batches."""


@dataclass(frozen=True)
class GraphFacts:
    """What a step has to know of a program under a plan; the same on all ranks.

    Attributes:
        readers: the ranks that read each input, by its name.
        random_states: the names of the random state leaves.
        count_dtypes: the dtypes of the count leaves.
        loss_form: the shape and the dtype of the loss, for ranks that make none; None without a loss.
        draws_by_token: whether random numbers are told apart by tokens, counted over rows as long as each other.
    """

    readers: Mapping[str, frozenset[int]]
    random_states: tuple[str, ...]
    count_dtypes: tuple[torch.dtype, ...]
    loss_form: tuple[tuple[int, ...], torch.dtype] | None
    draws_by_token: bool

    @classmethod
    def of(cls, deduced: DeducedGraph) -> GraphFacts:
        """Read them off a graph."""
        graph = deduced.annotated.graph
        stages = {leaf.name: deduced.readers(leaf) for leaf in graph.leaves_of(LeafKind.INPUT)}
        return cls(
            readers={name: frozenset(d for stage in found for d in stage.devices) for name, found in stages.items()},
            random_states=tuple(leaf.name for leaf in graph.leaves_of(LeafKind.RANDOM_STATE)),
            count_dtypes=tuple(meta.dtype(leaf.node) for leaf in graph.leaves_of(LeafKind.COUNT)),
            loss_form=None if graph.loss is None else (tuple(meta.hints(graph.loss)), meta.dtype(graph.loss)),
            draws_by_token=draws_by_token(graph),
        )


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One program under one plan, as one rank runs it.

    Attributes:
        deduced: the program with the plan on it; the same on all ranks.
        devices: this rank's graphs: one, or one for each chunk of its stage; none if the plan leaves the rank out.
        engine: runs them.
        bridge: between home and compute parameters; every rank has one.
        buffers: where each buffer that this rank reads lies.
        updates: where each buffer that is updated lies, over all ranks, if all pipelines have rows.
        constants: this rank's parts of the graph's constants.
        facts: what a step has to know of the program.
        use: tells which parameters a backward reaches.
        contributes_loss: whether this rank's local loss counts: one rank's per pipeline, in all if each has it whole.
        units: of parameters, where they are gathered unit by unit.
    """

    deduced: DeducedGraph
    devices: tuple[DeviceGraph, ...]
    engine: Engine | None
    bridge: Bridge
    buffers: Mapping[str, Annotation]
    updates: Mapping[str, Annotation]
    constants: Mapping[str, Tensor]
    facts: GraphFacts
    use: GraphUse
    contributes_loss: bool
    units: UnitPlan | None = None

    @property
    def device(self) -> DeviceGraph | None:
        """Return this rank's graph, the first of several; None if the plan leaves the rank out."""
        return self.devices[0] if self.devices else None

    def updates_of(self, pipelines: Collection[int]) -> Mapping[str, Annotation]:
        """Return where the buffers lie that a step of these pipelines has updated: others have had no rows."""
        if len(pipelines) == len(self.deduced.annotated.stages):
            return self.updates
        return self._updates_of_some(tuple(pipelines))

    @once
    def _updates_of_some(self, pipelines: tuple[int, ...]) -> Mapping[str, Annotation]:
        return _update_annotations(self.deduced, pipelines)

    @property
    def num_bytes(self) -> int:
        """Return what it takes: its nodes, and constants that are no views of the captured graph's."""
        graph = self.deduced.annotated.graph
        count = sum(len(one.graph.nodes) for one in self.devices or (graph,))
        return NODE_BYTES * count + bytes_besides(self.constants.values(), graph.constants.values())

    @property
    def talks_in_step(self) -> bool:
        """Tell whether replicas exchange sums in the middle of the model, so that none may stay away."""
        return self.deduced.talks_across_replicas


@dataclass(frozen=True, slots=True)
class _Leaves:
    """Leaves of autograd, the copies of parameters that they are of, and the names of those that need a gradient."""

    leaves: dict[str, Tensor]
    copies: Mapping[str, Tensor]
    trained: Collection[str]

    def share_memory_with(self, copies: Mapping[str, Tensor]) -> bool:
        """Tell whether they share their memory with these."""
        return self.copies.keys() == copies.keys() and all(map(is_, self.copies.values(), copies.values()))


class GraphCompute(Compute):
    """The device graphs that have been made for a compute layout; all that has it is made from its first plan."""

    def __init__(
        self, table: GroupTable, homes: Mapping[str, nn.Parameter], plan: Plan, backend: Any, *, replays: bool = False
    ) -> None:
        super().__init__(table, homes)
        self.plan, self.backend, self.replays = plan, backend, replays
        # What is made of a program goes with it, when it is no longer among those that are kept.
        self._stages: WeakKeyDictionary[Program, dict[StageKey, StagePlan]] = WeakKeyDictionary()
        self._deduced: WeakKeyDictionary[Program, bytes] = WeakKeyDictionary()
        self._outdated: WeakSet[StagePlan] = WeakSet()  # whose bridge leads to homes of before
        self._spare: _Leaves | None = None
        self._buffers: dict[tuple[Bridge, UnitPlan], UnitBuffers] = {}

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """Return what has been made so far."""
        return tuple(stage for made in self._stages.values() for stage in made.values())

    @property
    def has_graphs(self) -> bool:
        """Tell whether graphs are kept; the same on all ranks."""
        return bool(self.stages)

    @property
    def graph_bytes(self) -> int:
        """Return what this rank's graphs take: nodes, and constants that are no views of the captured graph's."""
        return sum(stage.num_bytes for stage in self.stages)

    def known(self, program: Program, key: StageKey) -> StagePlan | None:
        """Return the program under this layout if that has been made, for the present homes."""
        found = self._stages.get(program, {}).get(key)
        return None if found in self._outdated else found

    def deduced(self, program: Program) -> DeducedGraph:
        """Return the program under this layout, deduced anew where no graph has been made of it."""
        stages = self._stages.get(program, {}).values()
        known = next((stage.deduced for stage in stages), None)
        deduce = Deduce(self.table.topology)
        return known or deduce_program(program, self.plan, wants_values=not program.loss_name, deduce=deduce)

    def made(self, program: Program, key: StageKey) -> StagePlan:
        """Make the program under this layout, or lead what has been made to the present homes; collective."""
        stages = self._stages.setdefault(program, {})
        before = stages.get(key)
        if before is not None:
            bridge = raise_on_all_ranks(self.table, lambda: self._bridge(before.deduced, before.units))
            stages[key] = replace(before, bridge=bridge)
        else:
            known = None if any(key) else self._deduced.pop(program, None)
            # By one rank for all: ways are weighed by sizes of the example batch, which ranks have of their own.
            deduced = broadcast_from_rank0(self.table, lambda: known or self._deduce(program, key))
            stages[key] = raise_on_all_ranks(self.table, lambda: self._make(program, deduced))
        self.sizes = None
        return stages[key]

    def expect(self, program: Program, deduced: bytes) -> None:
        """Take over what another process has deduced of a program for this layout: of its graphs for training.

        On a decoder of 9 blocks of a width of 256, deducing takes 0.26 s (replicas) to 0.85 s (tensor parallel) of
        processor time, reading what was deduced 0.03 to 0.045 s; what is left to make here, 0.08 to 0.13 s.
        """
        self._deduced[program] = deduced

    def take_leaves(self, copies: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, Tensor]:
        """Return copies as leaves of a step's graph of autograd: those of a step that is over, if there are any."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.trained is trained and spare.share_memory_with(copies):
            return spare.leaves
        return super().take_leaves(copies, trained)

    def give_back(self, leaves: dict[str, Tensor], copies: Mapping[str, Tensor], trained: Collection[str]) -> None:
        """Keep leaves for the next step, while the copies are kept that they share their memory with."""
        made = _Leaves(leaves, copies, trained)
        self._spare = made if made.share_memory_with(self._gathered[1]) else None

    def drop_copies(self) -> None:
        """Forget the copies of the parameters; the next run gathers them again."""
        super().drop_copies()
        self._spare = None
        self._buffers.clear()  # steps whose backward is to come keep theirs

    def walk(self, units: UnitPlan, bridge: Bridge, first: int) -> UnitWalk:
        """Return a step's way through units; a gradient comes back to the visits from `first` on."""
        key = bridge, units
        if key not in self._buffers:
            self._buffers.clear()  # so that there are never those of two bridges
            self._buffers[key], self.sizes = UnitBuffers(units, bridge, self.device), None
        return UnitWalk(self._buffers[key], own_pieces(self.homes), first)

    @property
    def buffers(self) -> tuple[UnitBuffers, ...]:
        """Return those in which units are gathered."""
        return tuple(self._buffers.values())

    @property
    def entries(self) -> tuple[BridgeEntry, ...]:
        """Return what copies, or units, come by."""
        return super().entries or next((bridge.plan.entries for bridge, _ in self._buffers), ())

    @property
    def has_copies(self) -> bool:
        """Tell whether copies of the parameters are kept, or buffers for them; the same on all ranks."""
        return super().has_copies or bool(self._buffers)

    @property
    def copy_bytes(self) -> int:
        """Return what these take besides the homes."""
        return super().copy_bytes + sum(buffers.num_bytes for buffers in self.buffers)

    def rehome(self) -> None:
        """Forget what belongs to the present homes; bridges to the new ones are made when they are needed."""
        super().rehome()
        self._outdated = WeakSet(self.stages)

    def drop(self) -> None:
        """Forget everything; the next run makes it again."""
        super().drop()
        self._stages.clear()
        self._deduced.clear()
        self._outdated.clear()

    def _make(self, program: Program, data: bytes) -> StagePlan:
        deduced = _read(program, data)
        if self.table.rank == 0:
            _warn_of(gathered_ops(deduced, self.plan, cluster=self._cluster))
        layouts, units = deduced.annotated.layouts_of(self.table.rank), self._units(deduced)
        devices = tuple(self._device(deduced, chunk) for chunk in range(max(1, len(layouts))))
        made = tuple(device for device in devices if device is not None)
        return StagePlan(
            deduced=deduced,
            devices=made,
            engine=self._engine(made, deduced.annotated, units) if made else None,
            bridge=self._bridge(deduced, units),
            buffers=_leaf_annotations(deduced, layouts, LeafKind.BUFFER),
            updates=_update_annotations(deduced, range(len(deduced.annotated.stages))),
            constants=self._constants(deduced, layouts),
            facts=GraphFacts.of(deduced),
            use=GraphUse(deduced.annotated.graph),
            contributes_loss=bool(made) and _contributes_loss(deduced, made[0]),
            units=units,
        )

    def _units(self, deduced: DeducedGraph) -> UnitPlan | None:
        """Return the units in which parameters are gathered, the same on all ranks; None where they are for a step."""
        if self.table.size == 1 or self.plan.zero < 3 or not deduced.annotated.runs_in_step:
            return None
        graph = deduced.annotated.graph
        homes = {leaf.name: self.homes[leaf.name] for leaf in graph.leaves_of(LeafKind.PARAMETER)}
        return plan_units(graph, {name: home.numel() * home.dtype.itemsize for name, home in homes.items()})

    def _device(self, deduced: DeducedGraph, chunk: int) -> DeviceGraph | None:
        """Return the graph of a chunk of this rank's stage; None if the plan leaves the rank out."""
        device = run_pass(Specialize(self.table.rank, chunk), deduced)
        if device is None:
            return None
        check_computes(device_type_record(self.device), deduced.annotated.stage(device.layout).dtype, self.table.rank)
        device = run_pass(Place(self.device, is_alone=self._is_alone), device)
        device = run_pass(ChooseAlgorithms(Lowering(self.table.topology)), device)
        device = run_pass(Recompute(deduced.annotated), device)
        if self.backend is None:  # compiled graphs make all gradients at once
            device = run_pass(WeightsLater(self.plan.schedule), device)
        return run_pass(Overlap(deduced.annotated, self._cluster, on_host=self.device.type == HOST.type), device)

    @property
    def _cluster(self) -> Cluster | None:
        return self.table.topology if isinstance(self.table.topology, Cluster) else None

    @property
    def _is_alone(self) -> bool:
        """Tell whether the graph runs under ordinary autograd, and nobody else has its parameters."""
        in_one_go = len(self.plan.stages) == 1 and self.plan.pipelines[0].micro_batches == 1
        return self.table.size == 1 and in_one_go and self.backend is None

    def _deduce(self, program: Program, key: StageKey) -> bytes:
        wants_values, splits = key
        plan = _with_several_micro_batches(self.plan) if splits else self.plan
        deduce = Deduce(self.table.topology)
        deduced = deduce_program(program, plan, wants_values=wants_values, deduce=deduce)
        return serialize(deduced, program.graph, program.factors, program.flow)

    def _bridge(self, deduced: DeducedGraph, units: UnitPlan | None) -> Bridge:
        entries = _bridge_entries(deduced, self.homes)
        if units is not None:
            unit_of = units.unit_of
            entries = sorted((replace(e, unit=unit_of[e.name]) for e in entries), key=lambda entry: entry.unit)
        return self.find_bridge(entries)

    def _engine(self, devices: Sequence[DeviceGraph], annotated: AnnotatedGraph, units: UnitPlan | None) -> Engine:
        ends = [Ends(device.handovers_in, device.handovers_out) for device in devices]
        first = devices[0].layout
        stage = annotated.pipelines[first.pipeline].deal.stage(first.index)
        p2p = StageP2P(stage, ends, self.table, self.device)
        paths = annotated.graph.block_paths
        return Engine([self._chunk(device, paths, units) for device in devices], p2p)

    def _chunk(self, device: DeviceGraph, paths: tuple[str, ...], units: UnitPlan | None) -> Chunk:
        slots = device.slots if units is None else (*device.slots, UNITS)
        run = lower(self.module(device, paths, units), self.backend, [slot.kind in FIXED_SIZES for slot in slots])
        return Chunk(replace(device, slots=slots), self._replayed(device, run))

    def module(self, device: DeviceGraph, paths: tuple[str, ...], units: UnitPlan | None) -> fx.GraphModule:
        """Return what a device graph runs as, before it is compiled: with units, it gathers their parameters."""
        module = run_pass(RecomputingModule(), device)
        if units is None:
            return module if self.backend is None else run_pass(BlockModules(paths), module)
        names = tuple(slot.name if slot.kind is SlotKind.PARAMETER else None for slot in device.slots)
        numbers = tuple(None if name is None else units.unit_of[name] for name in names)
        return run_pass(Units(units, names), run_pass(BlockModules(paths, numbers), module))

    def _replayed(self, device: DeviceGraph, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what replays a graph's function, where that is wanted and can be."""
        if not self.replays:
            return run
        why = hindrance(device, device_type_record(self.device))
        if why is not None:
            warn_user(f"cuda_graphs: rank {self.table.rank} runs without, as {why}")
            return run
        return RecordedCalls(run, [slot.kind in FIXED_PLACES for slot in device.slots], self.device)

    def _constants(self, deduced: DeducedGraph, layouts: Sequence[StageLayout]) -> dict[str, Tensor]:
        annotations = _leaf_annotations(deduced, layouts, LeafKind.CONSTANT)
        values = deduced.annotated.graph.constants
        return {name: local_part(values[name], at, self.table.rank).to(self.device) for name, at in annotations.items()}


class GatheredRowsWarning(UserWarning):
    """An op in which rows meet is given the rows of all replicas, each of which computes the whole."""


def _warn_of(gathered: Iterable[GatheredOp]) -> None:
    for one in gathered:
        if KINDS[one.kind].is_warned_of:
            warn_user(str(one), GatheredRowsWarning)


def _read(program: Program, data: bytes) -> DeducedGraph:
    """Return the deduced graph of a program; where ranks are threads of one process they have it together."""
    known, key = program.analysed.deduced, hashlib.sha256(data).digest()
    found = known.get(key)
    if found is None:
        found = known[key] = deserialize(data, program.graph, program.factors, program.flow)
    return found


def _with_several_micro_batches(plan: Plan) -> Plan:
    pipelines = (replace(pipeline, micro_batches=max(2, pipeline.micro_batches)) for pipeline in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def _bridge_entries(deduced: DeducedGraph, homes: Mapping[str, nn.Parameter]) -> list[BridgeEntry]:
    """Return what the bridge moves for one program: its parameters, in the graph's order."""
    entries = []
    for leaf in deduced.parameters():
        home = homes[leaf.name]
        compute, gradient = deduced.parameter_annotations(leaf)
        at_home, shape = get_home_layout(home).annotation, tuple(home.shape)
        taken = taken_once(gradient, at_home, shape)
        trained = home.requires_grad
        entries.append(BridgeEntry(leaf.name, shape, home.dtype, at_home, compute, taken, trained=trained))
    return entries


def _contributes_loss(deduced: DeducedGraph, device: DeviceGraph) -> bool:
    loss, annotated = deduced.annotated.graph.loss, deduced.annotated
    if loss is None:
        return False
    pipeline = device.layout.pipeline
    stages, stage_of = annotated.stages[pipeline], annotated.stage_of[pipeline]
    holders = stages[stage_of.get(loss, len(stages) - 1)].devices  # not the last, where no loss is made of that
    spread = isinstance(deduced.batch.states[loss], Summed)
    return device.rank == holders[0] and (spread or pipeline == 0)


def _leaf_annotations(deduced: DeducedGraph, layouts: Sequence[StageLayout], kind: LeafKind) -> dict[str, Annotation]:
    """Return where the leaves lie that a rank of these layouts reads."""
    leaves = deduced.annotated.graph.leaves_of(kind)
    pairs = ((leaf, layout) for leaf in leaves for layout in layouts if layout in deduced.readers(leaf))
    return {leaf.name: deduced.value_annotation(leaf.node, layout) for leaf, layout in pairs}


def _update_annotations(deduced: DeducedGraph, pipelines: Sequence[int]) -> dict[str, Annotation]:
    """Return where the parts of each updated buffer lie: on the stage of each of the pipelines that computes it."""
    annotations = {}
    for leaf, node in deduced.annotated.graph.outputs_of(OutputKind.BUFFER_UPDATE):
        stages = deduced.annotated.stages
        makers = tuple(stages[p][deduced.annotated.stage_of[p].get(node, len(stages[p]) - 1)] for p in pipelines)
        annotations[leaf.name] = deduced.across(node, makers, "duplicate")
    return annotations


class GraphVariant(Variant):
    """A plan, and the device graphs of its compute layout."""

    compute: GraphCompute

    def stage(self, program: Program, wants_values: bool, *, splits: bool = False) -> StagePlan:
        """Return the program under this plan; collective where it has to be made.

        With `splits`, pipelines have several micro-batches, whatever the plan says.
        """
        key = wants_values, splits
        known = self.compute.known(program, key)
        if known is not None:
            return known
        with self.first_use.making():
            return self.compute.made(program, key)

    def gathered(self, program: Program, rows: int, cluster: Cluster | None) -> tuple[GatheredOp, ...]:
        """Return what a step of so many rows gathers because no rule splits it; see `gathered_ops`."""
        return gathered_ops(self.compute.deduced(program), self.plan, rows, cluster)
