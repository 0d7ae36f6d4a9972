"""`hetu-fx measure`: the devices at hand, their links and a model's blocks, as a cluster file and a profile file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetu_fx.base.progress import telling
from hetu_fx.base.words import rate_text, seconds_text
from hetu_fx.cli.given import check_folder, load_function, local_device
from hetu_fx.cluster.precisions import HEADER as PRECISIONS_HEADER
from hetu_fx.cluster.precisions import merge_precisions
from hetu_fx.cluster.precisions import precision_table as rows_of_precisions
from hetu_fx.cluster.ways import HEADER as WAYS_HEADER
from hetu_fx.cluster.ways import link_table as rows_of_ways
from hetu_fx.show.table import print_table

if TYPE_CHECKING:
    from hetu_fx.cluster.cluster import Cluster
    from hetu_fx.planner.values.profile_file import Profile

PRECISION_SECONDS = 0.2
"""How long products in each dtype are timed."""

_COLLECTIVES_HEADER = ("collective", "where", "kind", "ranks", "bandwidth", "latency")
_HEADER = ("kind", "degree", "a s^2", "b s", "c s", "R^2", "kept KB/token", "alpha")


def add_measure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx measure`."""
    parser.usage = (
        "hetu-fx measure [MODULE:FUNCTION] [options]\n"
        "       torchrun --nproc-per-node 8 -m hetu_fx.cli measure MODULE:FUNCTION --device cuda\n"
        "       hetu-fx emulate --speeds 0.8,0.4,0.2,0.2 -- hetu-fx measure MODULE:FUNCTION"
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="returns (model, example batch); without it, devices and links only",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        default=Path("cluster.json"),
        metavar="FILE",
        help="cluster file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="profile file to write (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: the one of the process's local rank")
    parser.add_argument(
        "--seconds",
        type=float,
        default=90.0,
        metavar="S",
        help="time budget for the blocks, about (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print both files as JSON instead of tables")


def call_measure(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx measure`; collective over the processes of the job, of which the first writes."""
    import torch
    import torch.distributed as dist

    from hetu_fx.cluster.cluster import Cluster
    from hetu_fx.cluster.device_speed import speedups
    from hetu_fx.cluster.links import groups_to_time, time_collectives
    from hetu_fx.cluster.measure import measure_ways
    from hetu_fx.comm_ops.wire.consensus import all_gather_object
    from hetu_fx.comm_ops.wire.groups import GroupTable
    from hetu_fx.prepare import join_world

    make = None if options.model is None else load_function(options.model)
    join_world()
    table, device = GroupTable(), local_device(options.device)
    rank = table.rank
    with telling("measuring devices and links"):
        cluster = Cluster.measure(table, device=device)
        cluster = replace(
            cluster, collectives=time_collectives(table, groups_to_time(cluster.groups, cluster.devices), device)
        )
        types = all_gather_object(table, torch.device(device).type)
        cluster = replace(cluster, ways=measure_ways(table, cluster.nodes, types, device, all_ways=True))
        found = all_gather_object(table, speedups(device, PRECISION_SECONDS))
        cluster = replace(cluster, precisions=merge_precisions([one.kind for one in cluster.devices], found))
    if rank == 0:
        cluster.write(options.cluster)
        if not options.json:
            print(cluster, flush=True)
            _show_collectives(cluster)
            _show_ways(cluster)
            _show_precisions(cluster)
    profile = None if make is None else _profile(make, cluster, device, options.seconds)
    if rank == 0:
        _tell_profile(options, cluster, profile)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx profile`."""
    parser.usage = "hetu-fx profile SCRIPT.py:FUNCTION [--out FILE]"
    parser.add_argument("model", metavar="SCRIPT:FUNCTION", help="returns (model, example batch of all devices)")
    parser.add_argument("--out", type=Path, default=Path("profile.json"), metavar="FILE", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON and no file")


def call_profile(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx profile`: count what a step costs from the captured graph; nothing is run."""
    from hetu_fx.errors import ProfileError
    from hetu_fx.planner.api import profile

    check_folder("--out", options.out, ProfileError)
    made = load_function(options.model)()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise ProfileError(f"{options.model} returned {type(made).__name__}\nhint: return (model, example batch)")
    with telling("profiling"):
        found = profile(*made)
    if options.json:
        print(json.dumps(found.to_json(), indent=2))
        return 0
    found.write(options.out)
    print(f"{options.out}: {found}")
    return 0


def _tell_profile(options: argparse.Namespace, cluster: Cluster, profile: Profile | None) -> None:
    """Write the profile, and print it; as JSON together with the cluster."""
    if profile is not None:
        profile.write(options.profile)
    if options.json:
        files = {"cluster": cluster, "profile": profile}
        print(json.dumps({name: file.to_json() for name, file in files.items() if file is not None}, indent=2))
    elif profile is not None:
        print_table(_HEADER, _times_table(profile))


def _profile(make: Callable[[], tuple[Any, Any]], cluster: Cluster, device: str, seconds: float) -> Profile:
    import torch

    from hetu_fx.base.torch_private import tree_map_only
    from hetu_fx.planner.api import profile
    from hetu_fx.planner.measure.block_times import Measuring

    model, batch = make()
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    return profile(model.to(device), batch, measured=Measuring(cluster, seconds))


def _show_collectives(cluster: Cluster) -> None:
    rows = [
        [c.name, c.where, c.kind, str(c.num_ranks), rate_text(c.bytes_per_second), seconds_text(c.latency_seconds)]
        for c in cluster.collectives
    ]
    if rows:
        print_table(_COLLECTIVES_HEADER, rows)


def _show_ways(cluster: Cluster) -> None:
    if cluster.ways:
        print_table(WAYS_HEADER, rows_of_ways(cluster.ways))


def _show_precisions(cluster: Cluster) -> None:
    if cluster.precisions:
        print_table(PRECISIONS_HEADER, rows_of_precisions(cluster.precisions))


def _times_table(profile: Profile) -> list[list[str]]:
    """Return the cells of the table of times."""
    rows = []
    for time in profile.times:
        alpha = profile.slowdown(time.kind).get(time.tensor_parallel, 1.0)
        fit = "" if time.r_squared is None else f"{time.r_squared:.4f}"
        curve = [f"{value:.3g}" for value in (time.a, time.b, time.c)]
        kept = f"{time.bytes_per_token / 1e3:.4g}"
        rows.append([time.kind, str(time.tensor_parallel), *curve, fit, kept, f"{alpha:.3g}"])
    return rows
