"""From a model and a batch to a runtime: groups, capture, plans, home parameters, variants."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.base.device_types import HOST, DeviceType, device_type_record, own_device
from hetu_fx.base.forked import settle_after_fork
from hetu_fx.base.frameworks import launchers, torch_optimizer
from hetu_fx.base.launcher_end import end_with_torchrun
from hetu_fx.base.progress import PhaseSeconds, telling
from hetu_fx.base.torch_private import OPTIMIZED_MODULE
from hetu_fx.base.user_warnings import warn_user
from hetu_fx.checkpoint.from_meta import Arrive, Weights, awaiting_values
from hetu_fx.checkpoint.own_init import META
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.host import memory_limits
from hetu_fx.comm_ops.wire.consensus import (
    agree,
    all_gather_object,
    broadcast_from_rank0,
    from_first,
    raise_on_all_ranks,
)
from hetu_fx.comm_ops.wire.groups import GroupTable, using, watched_group
from hetu_fx.comm_ops.wire.peers.mail import open_mail, open_rounds
from hetu_fx.comm_ops.wire.process_group import create_world
from hetu_fx.errors import EnvironmentProblem, PlanError, ProfileError, StateError
from hetu_fx.graph.bind import as_call
from hetu_fx.graph.leaves.trace import LeafWarning
from hetu_fx.graph.row_dims import NOTHING_ASKED, AskedRowDims
from hetu_fx.graph.shared_memory import overlapping
from hetu_fx.planner.captured_program import CapturedProgram, ModuleProgram, PlannedModule, PlannedProgram
from hetu_fx.planner.count.optimizer_state import optimizer_state_of, takes_sparse_gradients_alone
from hetu_fx.planner.price.stage_seconds import FORWARD_AND_BACKWARD
from hetu_fx.planner.simulate.simulate import expect
from hetu_fx.planner.values.options import Choice
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.planner.values.state import ParameterState
from hetu_fx.plans.homes import choose_homes, home_weights
from hetu_fx.plans.plan import PLAN_WORDS, Plan, plan_in_word
from hetu_fx.program.captures import Programs
from hetu_fx.program.lazy import initialize_lazy
from hetu_fx.program.program import AS_IT_STANDS
from hetu_fx.switching.adapt.adaptation import Adaptation
from hetu_fx.switching.adapt.replanning import Conditions, Planner
from hetu_fx.switching.adapt.tried import NOT_TRIED, TrialResult, TriedPlans, TryPlan
from hetu_fx.switching.eager.execution import EagerExecution, on_one_device_text
from hetu_fx.switching.eager.row_mode import BY_ROWS
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.home.layout import HomeLayout, home_layout
from hetu_fx.switching.home.ops import HomeTensor, get_home_layout
from hetu_fx.switching.home.parameters import cut_optimizer_state, move_home
from hetu_fx.switching.home.tensor import has_piece
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.settings import Settings
from hetu_fx.switching.step.execution import Execution, Reading
from hetu_fx.transforms.rewrites.op_overrides import OpOverrides

Plans = Plan | Sequence[Plan] | str | Path

_WITHOUT_GAIN_COMPILED = ("zero_bubble",)  # compiled backwards make all gradients at once
_NEGLIGIBLE = 1 / 16  # of a device's memory, by a bound that is many times what is held: all plans have room


@dataclass(frozen=True)
class Preparation:
    """What the user asked for; see `hetu_fx.auto_parallelize`.

    Attributes:
        works_by_rows: the user has said that a module that runs as it is works row by row.
        weights: where a model on the meta device gets its values from.
        device: on which its parameters are to be; None: where they are, or the rank's own.
    """

    model: nn.Module
    batch: Mapping[str, Any] | tuple[Any, ...]
    plan: Plans
    cluster: Cluster | str | Path | None
    optimizer: torch.optim.Optimizer | None
    loss_fn: Callable[..., Any] | None
    settings: Settings
    process_group: dist.ProcessGroup | None
    capture: str
    backend: Any
    row_dims: AskedRowDims = NOTHING_ASKED
    works_by_rows: bool = False
    weights: Weights = None
    device: torch.device | str | None = None


MakeTry = Callable[[Preparation, Execution[Any], int], TryPlan]
"""Makes what tries plans of a model that runs in a way, on so many ranks; while its parameters have their values."""


def prepare(wanted: Preparation, make_try: MakeTry | None = None) -> tuple[Runtime, Adaptation]:
    """Make the runtime, and what watches it; collective. Raises on every rank if it fails on one.

    Plans are tried by what `make_try` makes before anything of the model is changed.

    Ranks agree on what each has found out alone, on their examples, on what rank 0 finds out for all (graphs of
    examples of unequal sizes differ), and on what follows from that.
    """
    spent = PhaseSeconds()
    with spent.of("meet the other ranks"):
        ranks = _joined_ranks(wanted)
    seed = partial(_agreed_seed, wanted, ranks.table)
    with awaiting_values(wanted.model, wanted.weights, ranks.device, seed, ranks.table) as arrive:
        return _prepared(wanted, ranks, make_try, arrive, spent)


def _agreed_seed(wanted: Preparation, table: GroupTable) -> int:
    """Return the seed of all random numbers, the same on all ranks; collective."""
    return from_first(table, torch.initial_seed() % 2**62) if wanted.settings.seed is None else wanted.settings.seed


def _prepared(
    wanted: Preparation, ranks: _Ranks, make_try: MakeTry | None, arrive: Arrive | None, spent: PhaseSeconds
) -> tuple[Runtime, Adaptation]:
    """Make the runtime of a model whose values `arrive` once their homes are known; None: they are there."""
    table, least_bytes = ranks.table, ranks.least_bytes
    raise_on_all_ranks(table, lambda: _check_optimizer(wanted.optimizer, table.size))
    with spent.of("capture"):
        execution, program, example, plans, cluster = raise_on_all_ranks(
            table, lambda: _found(wanted, table.size, is_mixed=ranks.is_mixed)
        )
    with using(table):
        with spent.of("count costs"):
            rows_of_all = _agreed_rows(table, example, shared=wanted.settings.shared)
            seed = _agreed_seed(wanted, table)
            least_bytes = least_bytes if cluster is None else min(d.memory_bytes for d in cluster.devices)
            costs, length = broadcast_from_rank0(
                table, lambda: _costs(wanted, program, rows_of_all, _NEGLIGIBLE * least_bytes)
            )
        table.topology = cluster
        if cluster is not None and set(cluster.ranks) == set(range(table.size)):
            table.set_links(cluster.ways, cluster.nodes)
        planned = program.at(costs)
        tried = _tried_plans(wanted, execution, make_try, table)
        if plans is None:
            with spent.of("measure"), telling("measuring devices and links"):
                cluster = table.topology = cluster or _measured(wanted, costs, table)
            with spent.of("plan"):
                plans = (_auto_plan(planned, cluster, tried, table),)
        with spent.of("place parameters"):
            priced, layouts = raise_on_all_ranks(
                table, partial(_checked, wanted, execution, plans, costs, cluster, table)
            )
        with spent.of("try the plan"):
            for plan in priced:
                tried.ask(plan)
        planner = _planner_like(() if wanted.plan == "auto" else plans, _as_tried(planned, tried))
    settings = replace(wanted.settings, seed=seed)
    with spent.of("place parameters"):
        runtime = make_runtime(wanted.model, wanted.optimizer, table, execution, priced, layouts, settings, arrive)
    runtime.note_prepared(spent.seconds)
    health = settings.options.health
    calibrates = wanted.cluster is None
    adaptation = Adaptation(
        runtime, costs, cluster, planner, health=health, calibrates=calibrates, tried=tried, length=length
    )
    if wanted.plan == "auto":
        adaptation.plans[Conditions()] = priced[0]
    if cluster is not None:
        adaptation.replanning.begin()
    return runtime, adaptation


@dataclass(frozen=True)
class _Ranks:
    """The ranks, ready to send to each other.

    Attributes:
        table: of them.
        device: this rank's.
        is_mixed: whether they compute on several types of devices.
        least_bytes: of memory that one of them has.
    """

    table: GroupTable
    device: torch.device
    is_mixed: bool
    least_bytes: float


def _joined_ranks(wanted: Preparation) -> _Ranks:
    """Have the ranks meet; collective."""
    settle_after_fork()
    end_with_torchrun()
    join_world()
    table = GroupTable(watched_group(wanted.process_group, wanted.settings.options.patience_seconds))
    _warn_if_alone(table)
    _warn_of_layout(wanted.model, table)
    _check_group(table)
    own = _device_of(wanted)
    room = min(size for _, size in memory_limits(str(own))) / table.size  # which others may share
    types, rooms = zip(*all_gather_object(table, (own.type, room)), strict=True)
    table.know_types(types)
    table.connect(own)
    open_mail(table)
    open_rounds(table)
    return _Ranks(table, own, len(set(types)) > 1, min(rooms))


def _measured(wanted: Preparation, costs: ProgramCosts, table: GroupTable) -> Cluster:
    """Measure devices and links for as long as some steps take; collective."""
    flops = FORWARD_AND_BACKWARD * costs.rows * costs.whole.flops
    return Cluster.measure(table, device=str(_device_of(wanted)), step_flops=flops)


def _agreed_rows(table: GroupTable, example: Reading[Any], *, shared: bool) -> int:
    """Agree on the examples, and return how many rows they have together; collective.

    Graphs may be unlike where ranks' own rows differ: then they are those of all rows together, as in a step.
    """
    agreed = agree(table, example.facts, takes_unlike_graphs=True)
    rows = max(1, agreed.rows[0] if shared else sum(agreed.rows))
    if agreed.has_unlike_graphs:
        agree(table, raise_on_all_ranks(table, partial(example.of_rows, rows)).facts)
    return rows


def _tried_plans(
    wanted: Preparation, execution: Execution[Any], make_try: MakeTry | None, table: GroupTable
) -> TriedPlans:
    """Return what tries plans; a module that runs as it is goes by what is found."""
    make = raise_on_all_ranks(table, lambda: make_try and make_try(wanted, execution, table.size))
    untried = TrialResult(NOT_TRIED.says, BY_ROWS) if wanted.works_by_rows else NOT_TRIED
    tried = TriedPlans(table, make, untried)
    if isinstance(execution, EagerExecution):
        execution.mode_of = lambda plan: tried.found(plan).mode
    return tried


def _auto_plan(planned: PlannedProgram | PlannedModule, cluster: Cluster, tried: TriedPlans, table: GroupTable) -> Plan:
    """Return the plan that is made where none is given; collective.

    Where replicas of a module would all run the whole batch, it is a plan for one device.
    """
    with telling("planning") as tell:
        plan = broadcast_from_rank0(table, partial(planned.plan, cluster, "auto", tell=tell))
    if isinstance(planned, PlannedProgram) or len(plan.pipelines) == 1:
        return plan
    found = tried.ask(plan)
    if found.mode.by_rows:
        return plan
    plan = broadcast_from_rank0(table, partial(planned.on_one_device().plan, cluster, "auto"))
    if table.rank == 0 and len(plan.pipelines) == 1:
        warn_user(on_one_device_text(found.mode, plan), LeafWarning)
    return plan


def _as_tried(planned: PlannedProgram | PlannedModule, tried: TriedPlans) -> PlannedProgram | PlannedModule:
    """Return what is planned for, which goes by what was found: a module may not work row by row."""
    return planned if isinstance(planned, PlannedProgram) or tried.all_by_rows else planned.on_one_device()


def _planner_like(plans: Sequence[Plan], planned: PlannedProgram | PlannedModule) -> Planner:
    """Return what makes plans in the place of some that were given: it may compute in the low dtypes that they do."""
    dtypes = {stage.dtype for plan in plans for *_, stage in plan.stages if stage.dtype is not None}
    if not dtypes or isinstance(planned, PlannedModule):
        return planned.plan
    return partial(planned.plan, choice=Choice.of(allow=sorted(dtypes)))


def make_runtime(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    table: GroupTable,
    execution: Execution[Any],
    plans: Sequence[Plan],
    layouts: Mapping[str, HomeLayout],
    settings: Settings,
    arrive: Arrive | None = None,
) -> Runtime:
    """Bring parameters, and what an optimizer has of them, home; return what runs them under the plans. Collective.

    What waits for its values gets them when all are to `arrive`.
    """
    with using(table):
        if arrive is not None:
            arrive(layouts)
        homes = move_home(model, layouts, table)
    if optimizer is not None:
        cut_optimizer_state(optimizer, homes.values())
    runtime = Runtime(model, table, execution, homes, settings)
    for index, plan in enumerate(plans):
        runtime.add_variant(plan, plan.name or f"variant{index}")
    return runtime


def _device_of(wanted: Preparation) -> torch.device:
    """Return the device that a model is on, or is to be on."""
    found = next((parameter.device for parameter in wanted.model.parameters()), HOST)
    return own_device(wanted.device) if found.type == META.type else found


def _found(
    wanted: Preparation, ranks: int, *, is_mixed: bool
) -> tuple[Execution[Any], CapturedProgram | ModuleProgram, Reading[Any], Sequence[Plan] | None, Cluster | None]:
    """Find out what takes no other rank: how the model is to run, what planning knows of it, the example as it is read.

    Then the plans that were given, None where one is to be made, and the cluster, None where none was given.
    """
    _check_model(wanted.model, wanted.device)
    initialize_lazy(wanted.model, wanted.batch)
    if all(map(has_piece, wanted.model.parameters())):
        _check_memory(wanted.model)
    execution, program = _execution_of(wanted, ranks, is_mixed=is_mixed)
    batch, cluster = wanted.batch, wanted.cluster
    args, kwargs = as_call(batch)
    example = execution.read(args, kwargs, True, shared=wanted.settings.shared)
    given = cluster if cluster is None or isinstance(cluster, Cluster) else Cluster.read(cluster)
    return (
        execution,
        program,
        example,
        None if wanted.plan == "auto" else _given_plans(wanted.plan, ranks, execution),
        given,
    )


def _execution_of(
    wanted: Preparation, ranks: int, *, is_mixed: bool
) -> tuple[Execution[Any], CapturedProgram | ModuleProgram]:
    """Return the way in which the model is to run, and what planning knows of it.

    Where ranks compute on several types of devices (`is_mixed`), they have the casts of one.
    """
    options = wanted.settings.options
    match wanted.capture:
        case "graph":
            overrides = given_overrides(options.align)
            programs = Programs(
                wanted.model,
                wanted.loss_fn,
                overrides,
                casts_on_host=is_mixed,
                row_dims=wanted.row_dims,
                outputs=wanted.settings.outputs,
            )
            execution = GraphExecution(programs, wanted.batch, wanted.backend, replays=options.cuda_graphs)
            forbidden = ("zero_3",) * options.cuda_graphs  # under which parameters would not stay where they were
            forbidden += () if wanted.backend is None else _WITHOUT_GAIN_COMPILED
            return execution, CapturedProgram.of(programs, wanted.batch, forbidden=forbidden)
        case "eager" if wanted.backend is not None:
            raise StateError(
                f"compile={wanted.backend!r} compiles captured graphs, and capture='eager' makes none\n"
                f"hint: leave it out, and call .compile() on the modules that you want compiled"
            )
        case "eager" if options.cuda_graphs:
            raise StateError(
                "cuda_graphs=True is for captured graphs, and capture='eager' makes none\n"
                "hint: leave it out, and record modules by torch's make_graphed_callables"
            )
        case "eager" if options.align is not None:
            raise StateError(
                f"align={options.align!r} is for ops of captured graphs, and capture='eager' makes none\n"
                f"hint: leave it out, and cast in the model's forward where it is not exact enough"
            )
        case "eager" if wanted.settings.seed is not None:
            raise StateError(
                f"seed={wanted.settings.seed} is for the random numbers of captured graphs, but with capture='eager' "
                f"the module draws from torch's own generator\nhint: leave it out, and call torch.manual_seed"
            )
        case "eager":
            shared = wanted.settings.shared
            module = EagerExecution(wanted.model, wanted.loss_fn, wanted.batch, wanted.row_dims, shared=shared)
            module.check_rows_are_known(ranks)
            return module, ModuleProgram(wanted.model)
        case other:
            raise StateError(f"capture={other!r} is not known\nhint: use 'graph' or 'eager'")


def given_overrides(given: OpOverrides | str | Path | None) -> OpOverrides:
    """Return what was given, read where it is a file; without any, ops run as they stand."""
    if given is None or isinstance(given, OpOverrides):
        return given or AS_IT_STANDS
    return OpOverrides.read(given)


def join_world() -> None:
    """Initialise torch.distributed if a launcher has started several processes and nobody has done it yet."""
    if not dist.is_available() or dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise EnvironmentProblem(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set\n"
            f"hint: start the script with {' or '.join(launcher.command for launcher in launchers())}"
        )
    create_world(DeviceType.group_backends(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _warn_if_alone(table: GroupTable) -> None:
    """Say loudly that a launcher is there, but this process is alone."""
    if table.size == 1 and any(launcher.variable in os.environ for launcher in launchers()):
        ways = " or ".join(f"'{launcher.two_processes}'" for launcher in launchers())
        warn_user(
            f"hetu_fx runs on ONE process although a launcher started this script\n"
            f"hint: for two CPU processes use {ways}",
        )


def _warn_of_layout(model: nn.Module, table: GroupTable) -> None:
    """Say where a channels_last model keeps its layout on several ranks, and where not."""
    if table.rank == 0 and table.size > 1 and any(map(_is_channels_last, model.parameters())):
        warn_user(
            "the model is channels_last, but on several ranks weights, and rows of other ranks, arrive in the default "
            "layout. Convolutions run in channels_last if a rank's own rows are, and convert weights each time. "
            "Results are equal up to rounding\nhint: pass inputs in channels_last too, of even shares",
        )


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def _check_group(table: GroupTable) -> None:
    """Refuse a process group of other ranks than the first ones: optimizers and backward look ranks up in the world.

    Raises:
        EnvironmentProblem: on every rank of the group.
    """
    ranks = [table.to_global(rank) for rank in range(table.size)]
    if ranks != list(range(table.size)):
        raise EnvironmentProblem(
            f"process_group has ranks {ranks}, but it must be the first ranks of the world\n"
            f"hint: start the processes in another order, or leave ranks out by the plan (it need not use all devices)"
        )


def _check_memory(model: nn.Module) -> None:
    """Refuse parameters that are views of others, once all have their values."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for pair in overlapping({**dict(model.named_parameters()), **dict(model.named_buffers())}):
        if not trained.isdisjoint(pair):
            raise StateError(
                f"{pair[0]!r} and {pair[1]!r} share memory and are not one parameter: an optimizer that changes one "
                f"would change the other, which parallel devices do not\n"
                f"hint: use one parameter in both places, or take a copy (.clone())"
            )


def _check_model(model: nn.Module, device: torch.device | str | None) -> None:
    """Refuse a model without parameters, spread over devices already, or elsewhere than it is to be."""
    devices = {parameter.device for parameter in model.parameters()}
    if not devices:
        raise StateError("the model has no parameters, so there is nothing to parallelize")
    if len(devices) > 1:
        raise StateError(
            f"the model's parameters are on {len(devices)} devices {sorted(map(str, devices))}\n"
            f"hint: move the model to one device per process, such as model.to('cuda')"
        )
    here = next(iter(devices))
    if device is not None and own_device(device) != here:
        raise StateError(f"device={str(device)!r} is given, but the model is on {here}\nhint: move it by model.to(...)")
    kind = device_type_record(here)
    for name, parameter in model.named_parameters():
        if parameter.dtype in kind.no_dtypes:
            raise StateError(
                f"parameter {name!r} is {parameter.dtype}, in which devices of type {kind.name!r} cannot compute\n"
                f"hint: cast the model on all ranks, such as by model.float()"
            )


_WRAPPERS = (  # by the module that has them once it is imported, with what to give instead
    ("torch.nn.parallel", "DistributedDataParallel", "hint: give the model itself, model.module"),
    ("torch.nn.parallel", "DataParallel", "hint: give the model itself, model.module"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "hint: give the model as it is before FSDP wraps it"),
    ("torch.distributed.fsdp", "FSDPModule", "hint: give the model as it is before fully_shard"),
    (*OPTIMIZED_MODULE, "hint: give the model as it is before torch.compile, and compile='inductor' with it"),
)


def check_arguments(wanted: Preparation) -> None:
    """Refuse what was given in the place of something else, by its type alone; on each rank by itself.

    Raises:
        HetuFxError: says what to give.
    """
    model, optimizer = wanted.model, wanted.optimizer
    if not isinstance(model, nn.Module):
        raise StateError(f"model is a {type(model).__name__}\nhint: give a torch.nn.Module")
    for name, module in model.named_modules():
        for space, kind, way_out in _WRAPPERS:
            wrapper = getattr(sys.modules.get(space), kind, None)
            if wrapper is not None and isinstance(module, wrapper):
                where = f"its part {name!r} is" if name else "it is"
                raise StateError(
                    f"the model cannot be captured: {where} wrapped in {kind}, which runs it in a way of its own\n"
                    f"{way_out}"
                )
    as_call(wanted.batch)
    if optimizer is not None:
        _check_is_optimizer_of(optimizer, model)


def _check_is_optimizer_of(optimizer: Any, model: nn.Module) -> None:
    if isinstance(optimizer, type):
        raise StateError(
            f"optimizer is the class {optimizer.__name__}\nhint: give an optimizer, "
            f"{optimizer.__name__}(model.parameters(), ...), or leave it out and make it afterwards"
        )
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise StateError(
            f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer\nhint: give one that has state "
            f"already; others that hold parameters of the model work as they are"
        )
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in groups for parameter in group["params"]):
        raise StateError(
            "the optimizer holds none of this model's parameters, so that it would train nothing of it\nhint: make it "
            "of model.parameters(), of the model that is given here"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer | None, ranks: int) -> None:
    """Refuse, on several ranks, an optimizer that takes sparse gradients alone: between ranks they are dense."""
    known = None if optimizer is None or ranks == 1 else torch_optimizer(optimizer)
    if known is not None and takes_sparse_gradients_alone(known):
        raise StateError(
            f"{type(known).__name__} takes sparse gradients alone, but on {ranks} ranks gradients are dense\n"
            f"hint: use an optimizer that takes dense ones, such as torch.optim.Adam (which updates all rows), or SGD "
            f"or Adagrad (which do as with sparse ones)"
        )


def _costs(
    wanted: Preparation, program: CapturedProgram | ModuleProgram, rows: int, negligible_bytes: float
) -> tuple[ProgramCosts, int | None]:
    """Return what a step costs, and the length of the rows that it was counted for (None: it was not)."""
    asks = wanted.plan == "auto" or wanted.cluster is not None
    costs = program.costs(rows, memory=asks, negligible_bytes=negligible_bytes)
    length = program.length if isinstance(program, CapturedProgram) else None
    return replace(costs, state=_state(wanted)), length


def _state(wanted: Preparation) -> ParameterState:
    """Return what parameters cost with the optimizer; as with AdamW where it does not let itself be tried."""
    parameters = list(wanted.model.parameters())
    try:
        return optimizer_state_of(parameters, None if wanted.optimizer is None else torch_optimizer(wanted.optimizer))
    except ProfileError as problem:
        why, *_ = str(problem).splitlines()
        warn_user(f"memory is planned as for AdamW: {why}", same_on_all_ranks=True)
        return optimizer_state_of(parameters)


def _given_plans(given: Plans, ranks: int, execution: Execution[Any]) -> Sequence[Plan]:
    match given:
        case str() as word if word in PLAN_WORDS:
            blocks = execution.programs.num_blocks if isinstance(execution, GraphExecution) else 0
            return (plan_in_word(word, ranks, blocks),)
        case (str() | Path()) as path if not Path(path).is_file():
            words = ", ".join(map(repr, ("auto", *PLAN_WORDS)))
            raise PlanError(
                f"there is no plan file {Path(path).name!r} in {Path(path).absolute().parent}\nhint: write one by "
                f"Plan.write, or give a Plan or one of {words}"
            )
        case str() | Path() as path:
            return (_read_for_all(Path(path), ranks),)
        case Plan() as plan:
            return (plan,)
        case plans:
            if not plans or not all(isinstance(plan, Plan) for plan in plans):
                raise PlanError(f"plan is {plans!r}\nhint: give 'auto', a Plan, a list of Plans or a path")
            return tuple(plans)


def _read_for_all(path: Path, ranks: int) -> Plan:
    """Read a plan that was made with all ranks in mind; a plan that is no file may leave out whom it does not know."""
    plan = Plan.read(path)
    known = {*plan.devices, *(() if plan.predicted is None else plan.predicted.left_out)}
    if unknown := sorted({*range(ranks)} - known):
        raise PlanError(
            f"plan file {path.name!r} is for {len(known)} devices, and there are {ranks}: it neither uses nor leaves "
            f"out {unknown}\nhint: start fewer processes or machines, plan again for all, or give "
            f"hetu_fx.Plan.read({path.name!r}) itself, under which these do nothing"
        )
    return plan


def _checked(
    wanted: Preparation,
    execution: Execution[Any],
    plans: Sequence[Plan],
    costs: ProgramCosts,
    cluster: Cluster | None,
    table: GroupTable,
) -> tuple[tuple[Plan, ...], dict[str, HomeLayout]]:
    """Price and check all plans; return them, and where each parameter's home is."""
    priced = tuple(plans)
    if cluster is not None:
        known = (plan.predicted is not None or plan.has_program for plan in plans)  # costs know no programs
        pairs = zip(plans, known, strict=True)
        priced = tuple(p if is_known else replace(p, predicted=expect(p, costs, cluster)) for p, is_known in pairs)
    return priced, check_plans_and_choose_homes(priced, wanted.model, execution, cluster, table)


def check_plans_and_choose_homes(
    plans: Sequence[Plan], model: nn.Module, execution: Execution[Any], cluster: Cluster | None, table: GroupTable
) -> dict[str, HomeLayout]:
    """Check all plans, and return where each parameter's home is: near where the first plan reads it; collective.

    Shares are as this plan says, or in proportion to the devices' speed.
    """
    for plan in plans:
        execution.check(plan, table.size)

    def read_by_first() -> Mapping[str, Annotation]:
        for plan in plans:
            execution.check_ops(plan)
        return execution.compute_annotations(plans[0])

    read = broadcast_from_rank0(table, read_by_first)  # by one for all, as examples have other sizes on each
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    annotations = choose_homes(plans[0], read, shapes, home_weights(plans[0], cluster, table.size))
    layouts = {name: home_layout(annotations[name], shape, table.rank, table.size) for name, shape in shapes.items()}
    homes = {name: home for name, home in model.named_parameters() if isinstance(home, HomeTensor) and has_piece(home)}
    return layouts | {name: get_home_layout(home) for name, home in homes.items()}
