"""`hetu-fx verify SCRIPT:FUNCTION`: a model under plans against one device, as a table, JSON, and an exit status.

Without a launcher it starts the processes that the plans need; under one it uses those of the job. With `--ranks` this
process is all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetu_fx.cli.given import load_function, local_device
from hetu_fx.errors import BatchError, EnvironmentProblem, PlanError
from hetu_fx.show.table import table_text

if TYPE_CHECKING:
    from hetu_fx.check.verdict import TrialVerdict
    from hetu_fx.plans.plan import Plan

TOLERANCE = 1e-6
"""Relative; models compute in float64, but some cast down on the way, as transformers' losses do."""

_HEADER = ("plan", "step", "loss on one device", "loss", "difference", "worst gradient", "difference")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx verify`."""
    parser.usage = (
        "hetu-fx verify SCRIPT.py:FUNCTION [--plan FILE|auto|data|tensor|pipeline ...] [options]\n"
        "       torchrun --nproc-per-node 4 -m hetu_fx.cli verify MODULE:FUNCTION --plan plan.json"
    )
    parser.add_argument("model", metavar="SCRIPT:FUNCTION", help="returns (model, batch); the model returns its loss")
    parser.add_argument(
        "--plan",
        action="append",
        metavar="PLAN",
        help="a plan file, auto, data (uneven rows), tensor or pipeline; may be repeated (default: data and tensor)",
    )
    processes = parser.add_mutually_exclusive_group()
    processes.add_argument("--nproc", type=int, metavar="N", help="processes (default: what the plans need, or 2)")
    processes.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="no processes: all N ranks of the plans run in this one, on the CPU, which takes seconds for 64 of them",
    )
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="training steps (default: %(default)s)")
    parser.add_argument("--optimizer", default="SGD", metavar="NAME", help="of torch.optim (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, metavar="T", help="relative (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: the one of the process's local rank")
    parser.add_argument(
        "--row-dim",
        action="append",
        default=[],
        metavar="INPUT=DIM",
        help="the dim of an input that counts rows, or none; may be repeated (as row_dims of auto_parallelize)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)  # of processes that this command starts


def call_verify(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx verify`; the status is 0 when every plan gives what one device gives, else 1."""
    names = options.plan or ["data", "tensor"]
    if options.ranks is not None:
        told = [verdict.to_json() for verdict in _verdicts_of_all(options, names)]
    elif options.to is None and "WORLD_SIZE" not in os.environ:
        load_function(options.model)  # to say at once what is wrong with it
        told = _started(options, names)
    else:
        told = [verdict.to_json() for verdict in _verdicts(options, names)]
        if options.to is not None:
            return _written(options.to, told)
        if os.environ.get("RANK", "0") != "0":
            return 0
    print(json.dumps(told, indent=2) if options.json else as_text(told))
    return int(any(verdict["verdict"] != "equal" for verdict in told))


def _written(file: Path, told: list[dict[str, Any]]) -> int:
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(told))
    return 0


def _started(options: argparse.Namespace, names: Sequence[str]) -> list[dict[str, Any]]:
    """Start processes that verify, and return what they found."""
    world = str(options.nproc or max(2, *map(_processes_of, names)))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", world, "--rdzv-backend", "c10d"]
    given = [f"--{name}={getattr(options, name)}" for name in ("steps", "optimizer", "lr", "tolerance", "device")]
    plans = [*(f"--plan={name}" for name in names), *(f"--row-dim={dim}" for dim in options.row_dim)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdicts.json"
        command = ["-m", "hetu_fx.cli", "verify", options.model, *given, *plans, f"--to={file}"]
        whole = [sys.executable, *launcher, "--rdzv-endpoint", "localhost:0", *command]
        status = subprocess.run(whole, stdout=sys.stderr, check=False).returncode
        if status or not file.exists():
            raise EnvironmentProblem(
                f"the processes that were to compare ended with status {status}\nhint: read what they wrote, above"
            )
        verdicts: list[dict[str, Any]] = json.loads(file.read_text())
    return verdicts


def _processes_of(name: str) -> int:
    """Return how many processes a plan needs; those that are made fit any number."""
    from hetu_fx.plans.plan import PLAN_WORDS

    if name in ("auto", *PLAN_WORDS):
        return 0
    return max(_plan_file(name).devices) + 1


def _plan_file(name: str) -> Plan:
    from hetu_fx.plans.plan import Plan

    if not Path(name).is_file():
        raise PlanError(
            f"there is no plan file {Path(name).name!r} in {Path(name).absolute().parent}\nhint: give the path of one, "
            f"or auto, data, tensor or pipeline"
        )
    return Plan.read(name)


def _verdicts(options: argparse.Namespace, names: Sequence[str]) -> list[TrialVerdict]:
    """Compare in this job; collective."""
    import torch.distributed as dist

    from hetu_fx.cli.compare import Training, compare_plans
    from hetu_fx.prepare import join_world

    make = load_function(options.model)
    join_world()
    world = dist.get_world_size() if dist.is_initialized() else 1
    plans = {name: read_plan_name(name, world) for name in names}
    dims = _row_dims(options.row_dim)
    training = Training(options.steps, options.optimizer, options.lr, local_device(options.device), row_dims=dims)
    try:
        return compare_plans(make, plans, training, options.tolerance)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _verdicts_of_all(options: argparse.Namespace, names: Sequence[str]) -> list[TrialVerdict]:
    """Compare as all ranks, in this process."""
    from hetu_fx.cli.compare import Training, compare_plans

    if options.device != "cpu" or options.ranks < 1:
        raise PlanError(
            f"--ranks {options.ranks} --device {options.device} cannot be\n"
            f"hint: give 1 rank or more, all of them on the cpu"
        )
    plans = {name: read_plan_name(name, options.ranks) for name in names}
    dims = _row_dims(options.row_dim)
    training = Training(options.steps, options.optimizer, options.lr, options.device, options.ranks, dims)
    return compare_plans(load_function(options.model), plans, training, options.tolerance)


def _row_dims(given: Sequence[str]) -> dict[str, int | None]:
    """Return which dims count rows, as the command line says."""
    pairs = {name: dim for name, _, dim in (one.rpartition("=") for one in given)}
    if any(not name or not (dim == "none" or dim.removeprefix("-").isdecimal()) for name, dim in pairs.items()):
        raise BatchError(
            f"--row-dim {list(given)} names no dims\nhint: write it like --row-dim x=1 --row-dim mask=none"
        )
    return {name: None if dim == "none" else int(dim) for name, dim in pairs.items()}


def read_plan_name(name: str, world: int) -> Plan | str:
    """Return a plan by what was written on the command line, for so many processes."""
    from hetu_fx.plans.plan import PLAN_WORDS, Plan, plan_in_word

    ranks = tuple(range(world))
    if name == "auto":
        return name
    if name == "data":
        return Plan.data_parallel(ranks, [3 if rank % 2 == 0 else 1 for rank in ranks])
    return plan_in_word(name, world) if name in PLAN_WORDS else _plan_file(name)


def as_text(verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the table of all steps under all plans, and a line of judgement for each plan."""
    rows = [_row(verdict["plan"], step) for verdict in verdicts for step in verdict["steps"]]
    lines = [table_text(_HEADER, rows)] if rows else []
    return "\n".join(lines + [_judgement(verdict) for verdict in verdicts])


def _row(plan: str, step: dict[str, Any]) -> list[str]:
    numbers = [f"{step['loss_on_one_device']:.12g}", f"{step['loss']:.12g}", f"{step['loss_difference']:.1e}"]
    return [plan, str(step["step"]), *numbers, step["worst_gradient"], f"{step['gradient_difference']:.1e}"]


def _judgement(verdict: dict[str, Any]) -> str:
    if not verdict["steps"]:
        return f"{verdict['plan']}: {verdict['verdict']}: {verdict['says']}"
    worst = f"{verdict['worst_parameter']} {verdict['parameter_difference']:.1e}"
    line = f"{verdict['plan']}: {verdict['verdict']}; parameters and buffers after the steps: {worst}"
    return f"{line}; {verdict['says']}" if verdict["says"] else line
