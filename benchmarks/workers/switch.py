"""One rank of the switch benchmark: trains a step under every plan, and times the ways from one to another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint

import hetu_fx
from benchmarks.kit.contest import Step, adamw, barrier, slowest, timed, train_step
from benchmarks.kit.fleet import say
from benchmarks.kit.models import Size, batch, llama, num_parameters
from hetu_fx.comm_ops.plans.bsr_plan import TensorMove
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.bridge.bridge import BridgePlan
from hetu_fx.switching.home.ops import HomeTensor

WORLD = 4
QUICK, FULL = Size(width=512, layers=4, rows=8, tokens=16), Size(width=1024, layers=9, rows=8, tokens=16)
HOME, VARIANT, STEP, BESIDE, RESULT = "home", "variant", "step", "beside", "result.json"


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often everything is timed."""

    switches: int
    steps: int
    checkpoints: int


SHORT, LONG = Rounds(switches=3, steps=2, checkpoints=2), Rounds(switches=5, steps=3, checkpoints=3)
# Every plan to every other one, once.
ROUND = ("DP", "TP", "DP", "PP", "DP", "unequal", "TP", "PP", "TP", "unequal", "PP", "unequal", "DP")
SHORT_ROUND = ("DP", "TP", "unequal", "PP", "DP")


def plans(layers: int) -> dict[str, Plan]:
    """Make the plans by name."""
    stages = [layers // WORLD + (rank < layers % WORLD) for rank in range(WORLD)]
    halves = Stage((2,), (), layers // 2), Stage((3,), (), layers - layers // 2)
    return {
        "DP": Plan.data_parallel(range(WORLD)),
        "TP": Plan.tensor_parallel(range(WORLD)),
        "PP": Plan((Pipeline(tuple(Stage((rank,), (), blocks) for rank, blocks in enumerate(stages)), 1, 2),)),
        "unequal": Plan((Pipeline((Stage((0, 1), (3, 1), layers),), share=2), Pipeline(halves, share=1))),
    }


def work(rank: int, folder: Path, size: Size, rounds: Rounds) -> None:
    """Be one rank: time all switches, and let rank 0 write them."""
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", meeting, timeout=timedelta(minutes=10), rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    model: Any = llama(size)
    about = {"parameters": num_parameters(model), "size": str(size), "rounds": asdict(rounds)}
    optimizer = adamw(model)
    named = plans(size.layers)
    data = batch(size.rows, size.tokens)
    hetu_fx.auto_parallelize(model, data, plan=named["DP"], optimizer=optimizer, data="global")
    for name, plan in named.items():
        model.hetu.add_variant(plan, name)
        model.hetu.switch(name)
        train_step(model, optimizer, data)()  # makes graphs, groups and optimizer state
    say("variants are made")
    steps = variant_steps(model, train_step(model, optimizer, data), rounds.steps)
    say("steps are timed")
    optimizer.zero_grad()
    model.hetu.switch_home("DP")
    found: dict[str, Any] = {"about": about, STEP: steps, HOME: home_switches(model, rounds.switches)}
    say("changes of home are timed")
    found[BESIDE] = home_steps(model, optimizer, train_step(model, optimizer, data), rounds.steps)
    say("steps beside changes of home are timed")
    found[VARIANT] = variant_switches(model, data, rounds.switches)
    say("changes of variant are timed")
    found |= checkpoints(model, optimizer, folder, rounds.checkpoints)
    if rank == 0:
        (folder / RESULT).write_text(json.dumps(found))
    barrier()
    dist.destroy_process_group()


def variant_steps(model: Any, step: Step, rounds: int) -> list[dict[str, Any]]:
    """Time steps right after a change of variant, and the steps after those; all gather the changed parameters."""
    steps: list[dict[str, Any]] = []
    for pair in (("DP", "TP"), ("TP", "unequal")):
        for before, after in (pair, pair[::-1]):
            steps.append({"from": before, "to": after, "changed": [], "stayed": []})
        model.hetu.switch(pair[0])
        step()
        for _ in range(rounds):
            for found in steps[-2:]:
                model.hetu.switch(found["to"])
                for kind in ("changed", "stayed"):
                    found[kind].append(slowest(timed(step)))
    return steps


def home_switches(model: Any, rounds: int) -> list[dict[str, Any]]:
    """Change the home from every plan's to every other's, in turns; give seconds and bytes."""
    switches: dict[tuple[str, str], dict[str, Any]] = {}
    for _ in range(rounds):
        for pair in pairwise(ROUND):
            done: list[Any] = []
            switch = partial(model.hetu.switch_home, pair[1], overlap=False)
            seconds = slowest(timed(lambda switch=switch, done=done: done.append(switch())))
            (plan,) = done
            known = switches.setdefault(pair, {"from": pair[0], "to": pair[1], "seconds": []})
            known["seconds"].append(seconds)
            known["extra"] = plan.peak_extra_bytes / max(plan.state_bytes)
            known |= {"bytes": plan.total_bytes, "least bytes": plan.least_bytes, "messages": plan.num_messages}
    return list(switches.values())


def home_steps(model: Any, optimizer: torch.optim.Optimizer, step: Step, rounds: int) -> list[dict[str, Any]]:
    """Time changes of home and the steps after them: with all moved at once, and with a part moved beside the step."""
    model.hetu.switch("DP")
    step()
    found = [
        {"from": start, "to": end, "overlap": overlap, "stall": [], "arrived": [], "next": [], "after": []}
        for overlap in (False, True)
        for start, end in pairwise(SHORT_ROUND)
    ]
    for change in found:  # makes plans, of changes and of the steps after them
        model.hetu.switch_home(change["to"], overlap=change["overlap"])
        step()
    for _ in range(rounds):
        for change in found:
            optimizer.zero_grad()
            switch = partial(model.hetu.switch_home, change["to"], overlap=change["overlap"])
            change["stall"].append(slowest(timed(switch)))
            change["next"].append(slowest(timed(step)))
            arrived = slowest(model.hetu.stats["homes"][-1].seconds)
            change["arrived"].append(arrived + change["stall"][-1] * change["overlap"])
            change["after"].append(slowest(timed(step)))
    return found


def variant_switches(model: Any, data: Mapping[str, torch.Tensor], rounds: int) -> list[dict[str, Any]]:
    """Gather the parameters from a home near DP into every plan's layout: what the step after a switch waits for."""
    switches = []
    for name in ("DP", "TP", "PP", "unequal"):
        model.hetu.switch(name)
        model(**data)
        compute = model.hetu._runtime.variants[name].compute
        (stage,) = compute.stages
        seconds = []
        for _ in range(rounds):
            compute.drop_copies()
            seconds.append(slowest(timed(partial(compute.gather, stage.bridge))))
        told = bytes_of(stage.bridge.plan) | {"messages": len(stage.bridge.plan.gathers), "extra": ""}
        switches.append({"from": "home of DP", "to": name, "seconds": seconds, **told})
    return switches


def bytes_of(plan: BridgePlan) -> dict[str, int]:
    """Count what a gather sends over all ranks, and what readers lack."""
    entries = {entry.name: entry for entry in plan.entries}
    least = {e.name: TensorMove(e.home, e.compute, e.shape, e.dtype.itemsize).least_bytes for e in plan.entries}
    sent = sum(
        sum(message.sizes) * (len(message.lane.ranks) - 1) * bucket.dtype.itemsize
        for bucket in plan.gathers
        for message in bucket.messages
    )
    moved = sum(least[name] for bucket in plan.gathers for name in bucket.moved)
    return {"bytes": sent + moved, "least bytes": sum(least[name] for name in entries)}


def checkpoints(model: Any, optimizer: torch.optim.Optimizer, parent: Path, rounds: int) -> dict[str, list[float]]:
    """Save the state under one home and load it under another, by torch.distributed.checkpoint."""
    seconds: dict[str, list[float]] = {"save": [], "load": []}
    for number in range(rounds):
        folder = parent / str(number)
        model.hetu.switch_home("DP")
        state = state_of(model, optimizer)
        seconds["save"].append(slowest(timed(partial(checkpoint.save, state, checkpoint_id=folder))))
        model.hetu.switch_home("TP")
        state = state_of(model, optimizer)
        seconds["load"].append(slowest(timed(partial(checkpoint.load, state, checkpoint_id=folder))))
    return seconds


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> Mapping[str, torch.Tensor]:
    """Name the parameters and the optimizer's home tensors."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state[name] = parameter
        kept = optimizer.state[parameter].items()
        state |= {f"{name}/{key}": value for key, value in kept if isinstance(value, HomeTensor)}
    return state
