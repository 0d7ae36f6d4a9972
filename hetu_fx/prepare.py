"""From a model and a batch to a runtime: groups, capture, plans, home parameters, variants."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetu_fx.adaptation import Adaptation
from hetu_fx.annotations.annotation import Annotation
from hetu_fx.comm_ops.groups import GroupTable, using
from hetu_fx.errors import EnvironmentProblem, PlanError, StateError
from hetu_fx.plan import Plan
from hetu_fx.planner.cost import predict
from hetu_fx.planner.make_plan import PlanOptions, make_plan
from hetu_fx.planner.profile import program_costs
from hetu_fx.planner.program import ProgramCosts
from hetu_fx.switching.agreement import together
from hetu_fx.switching.home_layout import HomeLayout, home_layout
from hetu_fx.switching.home_parameters import move_home, move_optimizer_state
from hetu_fx.switching.home_plan import make_home_layouts
from hetu_fx.switching.program import Program
from hetu_fx.switching.programs import Programs
from hetu_fx.switching.runtime import Runtime, Settings, names_of
from hetu_fx.switching.variant import deduce_program
from hetu_fx.topology import Cluster

Plans = Plan | Sequence[Plan] | str | Path


@dataclass(frozen=True)
class Preparation:
    """What the user asked for; see `hetu_fx.auto_parallelize`."""

    model: nn.Module
    batch: Mapping[str, Any] | tuple[Any, ...]
    plan: Plans
    cluster: Cluster | str | Path | None
    optimizer: torch.optim.Optimizer | None
    loss_fn: Callable[..., Any] | None
    settings: Settings
    process_group: dist.ProcessGroup | None


def prepare(wanted: Preparation) -> tuple[Runtime, Adaptation]:
    """Make the runtime, and what watches it; collective. Raises on every rank if it fails on one."""
    join_world()
    table = GroupTable(wanted.process_group)
    warn_if_alone(table)
    together(table, lambda: check_model(wanted.model))
    programs = Programs(wanted.model, wanted.loss_fn)
    program = together(table, lambda: programs.first(wanted.batch, training=True))
    with using(table):
        costs, cluster = _measured(wanted, program, table)
        plans = together(table, lambda: _plans(wanted, program, costs, cluster))
        layouts = together(table, lambda: home_layouts_of(program, plans[0], wanted.model, cluster, table))
        together(table, lambda: _check_plans(program, plans, table))
        homes = move_home(wanted.model, layouts, table)
    if wanted.optimizer is not None:
        move_optimizer_state(wanted.optimizer, homes, layouts)
    runtime = Runtime(wanted.model, table, programs, homes, _seeded(wanted.settings, table))
    for name, plan in zip(names_of(plans), plans, strict=True):
        runtime.add_variant(plan, name)
    adaptation = Adaptation(runtime, costs, cluster, lambda at, name: _auto_plan(program, costs, at, name))
    runtime.observers.append(adaptation.observe)
    return runtime, adaptation


def join_world() -> None:
    """Initialise torch.distributed if a launcher has started several processes and nobody has done it yet."""
    if not dist.is_available() or dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise EnvironmentProblem(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; start the script with "
            f"torchrun or accelerate launch"
        )
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")


def warn_if_alone(table: GroupTable) -> None:
    """Say loudly that a launcher is there, but this process is alone."""
    launched = [name for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID") if name in os.environ]
    if table.size == 1 and launched:
        warnings.warn(
            "hetu_fx runs on ONE process although a launcher started this script; for two CPU processes use "
            "'torchrun --nproc-per-node 2 SCRIPT' or 'ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu "
            "--num_processes 2 --num_machines 1 SCRIPT'",
            stacklevel=4,
        )


def check_model(model: nn.Module) -> None:
    """Refuse a model without values, or spread over devices already."""
    devices = {parameter.device for parameter in model.parameters()}
    if not devices:
        raise StateError("the model has no parameters; there is nothing to parallelize")
    if torch.device("meta") in devices:
        name = next(n for n, p in model.named_parameters() if p.is_meta)
        raise StateError(
            f"parameter {name!r} is on the meta device and has no values; load the weights (model.to_empty, then "
            f"load_state_dict) before hetu_fx.auto_parallelize, or plan without running by hetu_fx.plan"
        )
    if len(devices) > 1:
        raise StateError(
            f"the model's parameters are on {len(devices)} devices {sorted(map(str, devices))}; move it to one "
            f"device per process, such as model.to('cuda')"
        )


def _measured(wanted: Preparation, program: Program, table: GroupTable) -> tuple[ProgramCosts, Cluster | None]:
    rows = _global_rows(wanted, program, table)
    costs = together(table, lambda: program_costs(program.graph, rows=rows, cut=program.tensor_cut))
    match wanted.cluster:
        case Cluster():
            return costs, wanted.cluster
        case None:
            return costs, Cluster.measure(table) if wanted.plan == "auto" else None
        case path:
            return costs, together(table, lambda: Cluster.read(path))


def _global_rows(wanted: Preparation, program: Program, table: GroupTable) -> int:
    rows = program.example_rows
    return rows if wanted.settings.shared else rows * table.size


def _plans(wanted: Preparation, program: Program, costs: ProgramCosts, cluster: Cluster | None) -> tuple[Plan, ...]:
    plans = tuple(_given_plans(wanted, program, costs, cluster))
    if cluster is None:
        return plans
    return tuple(p if p.predicted else replace(p, predicted=predict(p, costs, cluster)) for p in plans)


def _given_plans(wanted: Preparation, program: Program, costs: ProgramCosts, cluster: Cluster | None) -> Sequence[Plan]:
    match wanted.plan:
        case "auto":
            assert cluster is not None
            return (_auto_plan(program, costs, cluster, "auto"),)
        case str() | Path() as path:
            return (Plan.read(path),)
        case Plan() as plan:
            return (plan,)
        case plans:
            if not plans or not all(isinstance(plan, Plan) for plan in plans):
                raise PlanError(f"plan must be 'auto', a Plan, a list of Plans or a path, not {plans!r}")
            return tuple(plans)


def _auto_plan(program: Program, costs: ProgramCosts, cluster: Cluster, name: str) -> Plan:
    """Plan for a cluster; a program that mixes rows is not cut into micro-batches or stages."""
    mixed = program.mixes_rows
    options = PlanOptions(micro_batches=(1,) if mixed else (1, 2, 4, 8), pipelines=not mixed, name=name)
    return make_plan(costs, cluster, options=options)


def _check_plans(program: Program, plans: Sequence[Plan], table: GroupTable) -> None:
    for plan in plans:
        plan.check(num_blocks=program.graph.num_blocks, world_size=table.size)
        deduce_program(program, plan, wants_values=False)


def home_layouts_of(
    program: Program, plan: Plan, model: nn.Module, cluster: Cluster | None, table: GroupTable
) -> dict[str, HomeLayout]:
    """Return where each parameter's home is: near where the plan reads it, in proportion to the devices' speed."""
    deduced = deduce_program(program, plan, wants_values=False)
    read = {leaf.name: deduced.parameter_annotations(leaf)[0] for leaf in deduced.parameters()}
    everyone = tuple(range(table.size))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    compute = {name: read.get(name, Annotation.replicated(everyone)) for name in shapes}
    weights = [1.0 if cluster is None else cluster.device(rank).speed for rank in everyone]
    annotations = make_home_layouts(shapes, everyone, compute, weights, plan.zero)
    return {name: home_layout(annotations[name], shape, table.rank, table.size) for name, shape in shapes.items()}


def _seeded(settings: Settings, table: GroupTable) -> Settings:
    """Return settings with a seed that all ranks share: the given one, or rank 0's."""
    seed = [torch.initial_seed() % 2**62 if settings.seed is None else settings.seed]
    if table.size > 1:
        dist.broadcast_object_list(seed, src=table.to_global(0), group=table.base)
    return replace(settings, seed=seed[0])
