"""Inflicts faults on a training run at random moments, and checks what comes out of it.

`python -m tests.chaos --faults 200 --seed 1` runs `chaos_script.py` under `hetu-fx launch`: processes are killed and
stopped (also two at once, and with what they keep in memory), get no more memory, come back, are slow, compute what is
no number; the disk or the shared memory is full, the network slow or cut for a while. It passes if the run never hangs,
its parameters equal those of one process without faults, and no batch is lost or repeated. Prints a line for each
fault, a table at the end (also where it fails or is interrupted), and as its last line one JSON object.

`python -m tests.chaos --nodes 3 --faults 100 --seed 1` does so to machines, as root: in network namespaces they are
killed, told to leave, cut off and slowed, and come back; processes of them are killed. No finished step may be lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import hetu_fx.api  # noqa: F401  (once, for all forks)
from tests.chaos_faults import inflict_all
from tests.chaos_job import SCRIPT, Bounds, Job, set_steps
from tests.chaos_kinds import KINDS, Fault, left_out
from tests.chaos_nodes import (
    LEAST_NODES,
    NODE_KINDS,
    NodeFault,
    NodesJob,
    inflict_on_nodes,
    node_summary,
    print_node_table,
)
from tests.chaos_record import ChaosError, Lines
from tests.chaos_report import check_joins, print_table, summary
from tests.ranks.machines import machines, refusal

TOLERANCE = 1e-10


def check(
    result: dict[str, Any], told: Sequence[dict[str, Any]], right: dict[str, Any], alone: Sequence[dict[str, Any]]
) -> float:
    """Return the largest difference of any parameter. Raises ChaosError for it, and for batches lost or repeated.

    Args:
        result: of the run.
        told: what it said of its steps.
        right: the result without faults.
        alone: what was said of the steps of that.
    """
    if (last := check_steps(told)) != result["steps"]:
        raise ChaosError(f"the run has done {result['steps']} steps, and told of {last}")
    if [line["source"] for line in alone if "resumed" in line] != ["start"]:
        raise ChaosError("the run without faults has gone on from what another one left")
    losses = {line["step"]: line["loss"] for line in alone if "step" in line}
    for at, line in enumerate(told):
        if "step" in line and not abs(line["loss"] - losses[line["step"]]) <= TOLERANCE:
            before = "; ".join(map(json.dumps, told[max(0, at - 8) : at + 1]))
            raise ChaosError(f"the loss of step {line['step']} is not {losses[line['step']]}: {before}")
    worst = max(
        float((torch.tensor(result["parameters"][name]) - torch.tensor(whole)).abs().max())
        for name, whole in right["parameters"].items()
    )
    if not worst <= TOLERANCE:
        raise ChaosError(f"parameters differ by {worst:.3g} from those of a run without faults")
    return worst


def check_steps(told: Sequence[dict[str, Any]]) -> int:
    """Check that steps follow each other from where each start went on; returns the last one. Raises ChaosError."""
    last = most = 0
    for line in told:
        if "step" in line:
            if line["step"] != last + 1:
                raise ChaosError(f"step {line['step']} follows step {last}: batches were lost or repeated")
            last, most = last + 1, max(most, last + 1)
        elif "resumed" in line or "rolled_back" in line:
            last = line.get("resumed", line.get("rolled_back"))
            if last > most:
                raise ChaosError(f"went on from step {last}, and only {most} are done")
    return last


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the script with and without faults; returns what is to be reported, also where it fails."""
    bounds = Bounds(options.stopped_after, options.hang_after, options.rejoin_after)
    with tempfile.TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as folder:
        job, faults = Job(Path(folder) / "chaos", bounds, options.processes, options.zero), list[Fault]()
        told = {"seed": options.seed, "left_out": left_out(job), "failure": "", "worst_difference": None}
        for kind, reason in told["left_out"].items():
            say(f"left out: {kind}: {reason}")
        try:
            result = _run_with_faults(job, options, faults)
            check_joins(job)
            say(f"compares with a run of {result['steps']} steps without faults")
            expected = without_faults(Path(folder) / "right", result["steps"])
            told["worst_difference"] = check(result, job.progress(), *expected)
        except ChaosError as error:
            told["failure"] = f"seed {options.seed}: {error}"
            say((job.folder / "output").read_text()[-3000:])
        except KeyboardInterrupt:
            told["failure"] = "interrupted"
        finally:
            job.end()
        return {**told, "faults": len(faults), "steps": len(job.steps()), **summary(faults, job)}


def _run_with_faults(job: Job, options: argparse.Namespace, faults: list[Fault]) -> dict[str, Any]:
    """Inflict faults, which are put into a list one by one, and let the run come to its end; returns its result."""
    kinds = tuple(kind for kind in options.kinds if kind not in left_out(job))
    if not kinds:
        raise ChaosError(f"none of {', '.join(options.kinds)} can be done here")
    begin, chance = time.monotonic(), random.Random(options.seed)
    for fault in inflict_all(job, options.faults, kinds, options.interval, begin + options.seconds, chance):
        faults.append(fault)
        since, took = fault.over - begin, fault.over - fault.done
        say(f"{len(faults):4}/{options.faults} {since:6.0f} s  {fault.kind} at {fault.phase}: over after {took:.2f} s")
    job.wait_for("all to be back", lambda: len(job.starts()[-1]["workers"]) == options.processes)
    return job.finish()


def run_on_nodes(options: argparse.Namespace) -> dict[str, Any]:
    """Do the same to machines."""
    faults, begin = list[NodeFault](), time.monotonic()
    told: dict[str, Any] = {"seed": options.seed, "failure": "", "worst_difference": None, "load": [os.getloadavg()[0]]}
    with tempfile.TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as folder:
        Path(folder).mkdir(exist_ok=True)
        names = [f"node{number}" for number in range(options.nodes)]
        with machines(Path(folder), names) as found:
            job = NodesJob(Path(folder) / "chaos", found, options.processes, options.hang_after)
            try:
                for fault in inflict_on_nodes(job, options.faults, options.kinds, random.Random(options.seed)):
                    faults.append(fault)
                    say(f"{len(faults):4}/{options.faults} {time.monotonic() - begin:6.0f} s  {fault.text}")
                result = job.finish()
                right = without_faults(Path(folder) / "right", result["steps"])
                told["worst_difference"] = check(result, job.progress(), *right)
            except ChaosError as error:
                told["failure"] = f"seed {options.seed}: {error}"
            except KeyboardInterrupt:
                told["failure"] = "interrupted"
            finally:
                told["load"].append(os.getloadavg()[0])
                job.end()
            made = node_summary(faults, job)
    if lost := sum(row["steps_lost"] for row in made["rows"]):
        told["failure"] = told["failure"] or f"seed {options.seed}: {lost} finished steps were lost"
    return {**told, "faults": len(faults), "steps": len(job.steps()), **made}


def say(text: str) -> None:
    """Print it at once."""
    print(text, flush=True)


def without_faults(folder: Path, steps: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the script in this process alone; returns its result, and what it said of its steps."""
    folder.mkdir()
    set_steps(folder, steps)
    with patch.dict(os.environ, RANK="0", WORLD_SIZE="1"), patch.object(sys, "argv", [str(SCRIPT), str(folder)]):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads((folder / "result.json").read_text()), Lines(folder / "progress.jsonl")()


def main(words: Sequence[str] | None = None) -> int:
    """Run it, and print what came out."""
    kinds, node_kinds = ", ".join(map(repr, KINDS)), ", ".join(map(repr, NODE_KINDS))
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__, formatter_class=raw)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=0, metavar="N", help="machines, 3 or more (default: this one)")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help=f"{kinds}; with --nodes {node_kinds} (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=3, help="of a machine, at most (default: 3)")
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="of every other variant (default: 1)")
    parser.add_argument("--folder", type=Path, help="a new one, to keep what is written (default: nothing is kept)")
    for name, default, what in (
        ("--interval", 0.0, "between faults, at least"),
        ("--seconds", float("inf"), "after which no fault begins; the run is then ended, and compared"),
        ("--stopped-after", 3.0, "without a sign of life: a process is taken for stopped"),
        ("--hang-after", 180.0, "without what is awaited: the run hangs"),
        ("--rejoin-after", 1.0, "until a lost process comes back"),
    ):
        parser.add_argument(name, type=float, default=default, metavar="SECONDS", help=f"{what} (default: {default:g})")
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit from outside
    known = NODE_KINDS if options.nodes else KINDS
    options.kinds = options.kinds or tuple(known)
    if unknown := {*options.kinds} - {*known}:
        parser.error(f"--kinds has {sorted(unknown)}; there are {', '.join(map(repr, known))}")
    if options.nodes and (options.nodes < LEAST_NODES or refusal()):
        parser.error(refusal() or f"--nodes {options.nodes}: of two machines the one that serves goes on alone")
    made = run_on_nodes(options) if options.nodes else run(options)
    (print_node_table if options.nodes else print_table)(made)
    say(json.dumps(made))
    return 1 if made["failure"] else 0


if __name__ == "__main__":
    sys.exit(main())
