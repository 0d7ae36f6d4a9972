"""Inflicts faults on a training run at random moments, and checks what comes out of it.

`python -m tests.chaos --faults 200 --seed 1` runs `chaos_script.py` under `hetu-fx launch`: processes are killed and
stopped (also two at once), come back, are slow, compute what is no number, and the disk is full for a while. It passes
if the run never hangs, its parameters equal those of one process without faults, and no batch is lost or repeated.
Prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hetu_fx.api  # noqa: F401  (once, for all forks)
from tests.chaos_faults import KINDS, inflict_all
from tests.chaos_job import SCRIPT, Bounds, ChaosError, Job, set_steps
from tests.chaos_report import print_table, summary

TOLERANCE = 1e-10


def check(result: dict[str, Any], right: dict[str, Any], steps: int) -> float:
    """Return the largest difference of any parameter. Raises ChaosError for it, and for batches lost or repeated."""
    if result["seen"] != list(range(steps)):
        raise ChaosError(f"batches were lost or repeated: {result['seen']}")
    worst = max(
        float((torch.tensor(result["parameters"][name]) - torch.tensor(whole)).abs().max())
        for name, whole in right["parameters"].items()
    )
    if not worst <= TOLERANCE:
        raise ChaosError(f"parameters differ by {worst:.3g} from those of a run without faults")
    return worst


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the script with and without faults; returns what is to be reported. Raises ChaosError."""
    chance = random.Random(options.seed)
    bounds = Bounds(options.stopped_after, options.hang_after, options.rejoin_after)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder) / "chaos", bounds, options.processes)
        try:
            kinds = tuple(kind for kind in options.kinds if kind != "full" or job.disk.is_own)
            faults = inflict_all(job, options.faults, kinds, options.interval, chance)
            job.wait_for("all to be back", lambda: len(job.starts()[-1]["workers"]) == options.processes)
            result = job.finish()
        except ChaosError as error:
            output = (job.folder / "output").read_text()[-3000:]
            raise ChaosError(f"seed {options.seed}: {error}\n{output}") from error
        finally:
            job.end()
        steps = len(result["seen"])
        worst = check(result, without_faults(Path(folder) / "right", steps), steps)
        told = {"seed": options.seed, "left_out": sorted(set(options.kinds) - set(kinds))}
        return {**told, "faults": len(faults), "steps": steps, "worst_difference": worst, **summary(faults, job)}


def without_faults(folder: Path, steps: int) -> dict[str, Any]:
    """Run the script in this process alone; returns its result."""
    folder.mkdir()
    set_steps(folder, steps)
    os.environ.update(RANK="0", WORLD_SIZE="1")
    sys.argv[1:] = [str(folder)]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def main(words: Sequence[str] | None = None) -> int:
    """Run it, and print what came out."""
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=3)
    for name, default, what in (
        ("--interval", 0.0, "between faults, at least"),
        ("--stopped-after", 3.0, "without a sign of life: a process is taken for stopped"),
        ("--hang-after", 180.0, "without what is awaited: the run hangs"),
        ("--rejoin-after", 1.0, "until a lost process comes back"),
    ):
        parser.add_argument(name, type=float, default=default, metavar="SECONDS", help=f"{what} (default: {default:g})")
    try:
        made = run(parser.parse_args(words))
    except ChaosError as error:
        print(f"failed: {error}")
        return 1
    print_table(made)
    print(json.dumps(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
