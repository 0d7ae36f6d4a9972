"""`hetu-fx doctor`: what is wrong with the machine, the installation or the job, and what to do.

Alone it looks at this machine, and then starts two processes of itself, which look at what only several can tell.
Under a launcher it looks at that job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from hetu_fx.cli.finding import Finding, conclusion, make_finding
from hetu_fx.cli.machine_checks import machine_findings

TRIAL_SECONDS = 180.0
_OF_JOBS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hetu-fx doctor`."""
    parser.usage = (
        "hetu-fx doctor [--quick] [--json]\n"
        "       torchrun --nproc-per-node 8 -m hetu_fx.cli doctor [--device cuda] [--json]"
    )
    parser.add_argument("--quick", action="store_true", help="do not start two processes to see whether they meet")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: what is measured in a job (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def call_doctor(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run `hetu-fx doctor`; the status is 1 if something is wrong. In a job rank 0 prints."""
    in_job = int(os.environ.get("WORLD_SIZE", "1")) > 1
    shown = os.environ.get("RANK", "0") == "0"
    findings = []
    for finding in _findings(options, in_job=in_job):
        findings.append(finding)
        if shown and not options.json:
            print(finding, flush=True)
    if shown:
        told = {"findings": [finding.to_json() for finding in findings], "conclusion": conclusion(findings)}
        print(json.dumps(told, indent=2) if options.json else told["conclusion"])
    return int(any(finding.state == "wrong" for finding in findings))


def _findings(options: argparse.Namespace, *, in_job: bool) -> Iterator[Finding]:
    yield from machine_findings()
    if in_job:
        yield from _of_this_job(options.device)
    elif not options.quick:
        yield from _of_two_processes()


def _of_this_job(device: str) -> Iterator[Finding]:
    import torch.distributed as dist

    from hetu_fx.cli.given import local_device
    from hetu_fx.cli.job_checks import job_findings
    from hetu_fx.comm_ops.wire.groups import GroupTable
    from hetu_fx.prepare import join_world

    join_world()
    yield from job_findings(GroupTable(), local_device(device))
    dist.destroy_process_group()


def _of_two_processes() -> Iterator[Finding]:
    """Start two processes of this command, and yield what they find as a job."""
    print("starting two processes, to see whether they meet ...", file=sys.stderr, flush=True)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command = [*launcher, "--rdzv-endpoint", "localhost:0", "-m", "hetu_fx.cli", "doctor", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_JOBS}
    try:
        ended = subprocess.run(
            [sys.executable, *command],
            env={"OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
            check=False,
        )
        yield from trial_findings(ended.stdout, ended.stderr)
    except subprocess.TimeoutExpired:
        way = "see whether a firewall or a proxy stands between processes; set GLOO_SOCKET_IFNAME=lo to try"
        yield make_finding("two processes", f"have not met within {TRIAL_SECONDS:g} s", wrong=way)


def trial_findings(printed: str, errors: str) -> Iterator[Finding]:
    """Yield what two processes found as a job, from what they printed; or what became of them."""
    try:
        told = json.loads(printed)["findings"]
    except ValueError:
        last = (errors.strip().splitlines() or ["nothing was said"])[-1]
        way = "run the command yourself: torchrun --nproc-per-node 2 -m hetu_fx.cli doctor"
        yield make_finding("two processes", f"failed: {last}", wrong=way)
        return
    yield make_finding("two processes", "meet")
    names = ("versions of all ranks", "clocks", "speeds", "links")
    yield from (Finding(**one) for one in told if one["what"].startswith(names))
