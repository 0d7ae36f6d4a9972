"""What `hetu-fx doctor` looks at together with all processes of a job: versions, clocks, speeds, links."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib import metadata

from hetu_fx.base.words import rate_text
from hetu_fx.cli.finding import Finding, make_finding
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.cluster_table import link_text
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable

PACKAGES = ("hetu-fx", "torch", "numpy", "safetensors")
ROUNDS = 5
CLOCK_SECONDS, UNEQUAL, SLOW_BYTES, SLOW_SECONDS = 1.0, 1.25, 20e6, 5e-3


def job_findings(table: GroupTable, device: str) -> Iterator[Finding]:
    """Yield what each check says, the same on every rank; collective."""
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}
    yield versions_finding(all_gather_object(table, versions))
    yield clock_finding(_offsets(table))
    cluster = Cluster.measure(table, device=device)
    yield speed_finding(cluster)
    yield from link_findings(cluster)


def versions_finding(versions: Sequence[dict[str, str]]) -> Finding:
    """Tell whether all ranks have the same versions."""
    unlike = [name for name in versions[0] if len({of_rank[name] for of_rank in versions}) > 1]
    told = "; ".join(f"{name} {[of_rank[name] for of_rank in versions]}" for name in unlike)
    way = "install the same versions everywhere: every rank makes plans and graphs, which must be equal"
    return make_finding("versions of all ranks", told or f"equal on {len(versions)}", wrong=way if unlike else "")


def _offsets(table: GroupTable) -> list[float]:
    """Return how far each rank's clock is ahead of rank 0's, in seconds, to within what a message takes."""
    rounds = []
    for _ in range(ROUNDS):
        all_gather_object(table, None)  # all leave this at about the same moment
        rounds.append(all_gather_object(table, time.time()))
    return [statistics.median(told[rank] - told[0] for told in rounds) for rank in range(table.size)]


def clock_finding(offsets: Sequence[float]) -> Finding:
    """Tell whether clocks agree; offsets: seconds ahead of rank 0's."""
    most = max(offsets, key=abs)
    way = "run a time service (chrony, NTP): lines of logs and traces do not fit together" if _is_far(most) else ""
    return make_finding("clocks", f"within {abs(most) * 1e3:.3g} ms", doubtful=way)


def _is_far(seconds: float) -> bool:
    """Tell whether clocks differ by more than is good for logs."""
    return abs(seconds) > CLOCK_SECONDS


def speed_finding(cluster: Cluster) -> Finding:
    """Tell how fast devices are; unequal ones are what hetu_fx is for, and no fault."""
    speeds = {device.rank: device.flops_per_second for device in cluster.devices}
    told = ", ".join(f"rank {rank} {rate_text(speed, 'FLOP/s')}" for rank, speed in speeds.items())
    fastest, slowest = max(speeds.values()), min(speeds.values())
    unequal = f"; {fastest / slowest:.2g} : 1, plans give the faster ones more" if fastest > UNEQUAL * slowest else ""
    return make_finding("speeds", f"{told}{unequal}")


def link_findings(cluster: Cluster) -> Iterator[Finding]:
    """Yield what links carry, within nodes and between them."""
    links = {"within a node": cluster.intra}
    if len({device.node for device in cluster.devices}) > 1:
        links["between nodes"] = cluster.inter
    for where, link in links.items():
        is_slow = link.bytes_per_second < SLOW_BYTES or link.latency_seconds > SLOW_SECONDS
        way = "is this the interface that is meant? set GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME" if is_slow else ""
        yield make_finding(f"links {where}", link_text(link), doubtful=way)
