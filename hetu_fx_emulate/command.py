"""`hetu-fx emulate`, and what `hetu-fx env` says of it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from typing import assert_never, get_args

from hetu_fx.base.checks import parse_rate
from hetu_fx.errors import EnvironmentProblem
from hetu_fx_emulate.emulate import change_speed, run
from hetu_fx_emulate.emulation_plan import LimitChoice, plan_run
from hetu_fx_emulate.limits import Affinity, CgroupV1, CgroupV2, this_limiter
from hetu_fx_emulate.processes import Output
from hetu_fx_emulate.spec import EmulateSpec, parse_memory, parse_speeds


def add_emulate(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx emulate`."""
    parser.usage = "hetu-fx emulate --speeds 0.8,0.4,0.2,0.2 [options] -- COMMAND ..."
    parser.add_argument("--speeds", type=parse_speeds, metavar="S,S,...", help="cores per rank")
    parser.add_argument(
        "--memory",
        type=parse_memory,
        default=(),
        metavar="M,M,...",
        help="memory limit per rank, like 2G,512M,- (-: none)",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="spread the ranks over N nodes")
    parser.add_argument("--link", type=parse_rate, metavar="RATE", help="bandwidth between nodes, like 200mbit")
    parser.add_argument("--only-rank", type=int, metavar="R", help="show the output of this rank only")
    parser.add_argument("--no-prefix", action="store_true", help="do not prefix lines with their rank")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end all ranks after this time")
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time for the other ranks to exit after one fails (default: %(default)g)",
    )
    parser.add_argument("--limit", choices=get_args(LimitChoice), default="auto", help="how speeds are enforced")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print it as JSON")
    parser.add_argument("--set", metavar="RANK=SPEED", help="change the speed of a rank of the running emulation")


def call_emulate(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx emulate`; the status is the command's."""
    if options.set is not None:
        change_speed(*_rank_and_speed(options.set))
        return 0
    if options.speeds is None:
        raise EnvironmentProblem("no speeds given\nhint: name one per rank, e.g. --speeds 0.8,0.4,0.2,0.2")
    spec = EmulateSpec(
        speeds=options.speeds,
        memory=options.memory,
        num_nodes=options.nodes,
        link_bits_per_second=options.link,
    )
    if options.dry_run:
        lines = list(plan_run(spec, limit=options.limit).lines(rest))
        print(json.dumps(lines, indent=2) if options.json else "\n".join(lines))
        return 0
    return run(
        spec,
        rest,
        output=Output(prefix=not options.no_prefix, only_rank=options.only_rank),
        timeout_seconds=options.timeout,
        grace_seconds=options.grace,
        limit=options.limit,
    )


def _rank_and_speed(text: str) -> tuple[int, float]:
    rank, equals, speed = text.partition("=")
    if not (equals and rank.strip().isdecimal()):
        raise EnvironmentProblem(f"{text!r} is not a rank and its speed\nhint: write it like --set 2=0.1")
    return int(rank), parse_speeds(speed)[0]


def speeds_text() -> str:
    """Say how speeds of ranks are enforced on this machine."""
    limiter = this_limiter()
    match limiter:
        case CgroupV1(cpu, memory):
            return f"CPU quotas{'' if memory is None else ' and memory limits'} (cgroups version 1, {cpu})"
        case CgroupV2(base):
            return f"CPU quotas and memory limits (cgroups version 2, {base})"
        case Affinity(reason):
            return f"CPU affinity only: {reason}"
        case _:
            assert_never(limiter)


def nodes_text() -> str:
    """Say whether slow links between nodes can be had on this machine."""
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"no: {', '.join(missing)} not found"
    return "yes" if os.geteuid() == 0 else "no: needs root"
