"""What-if options of `hetu-fx plan`: devices gone, devices slower, another link between nodes."""

from __future__ import annotations

import argparse
from dataclasses import replace

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.devices import Link
from hetu_fx.emulate.spec import parse_rate
from hetu_fx.errors import ClusterError


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--without", type=int, nargs="+", action="extend", default=[], metavar="R", help="what if these ranks are gone"
    )
    parser.add_argument(
        "--rate", nargs="+", action="extend", default=[], metavar="R=X", help="what if rank R takes X times as long"
    )
    parser.add_argument("--link", metavar="RATE", help="what if nodes are joined by a link like 100mbit")


def changed(cluster: Cluster, options: argparse.Namespace) -> Cluster:
    """Return the cluster with what the options change. Raises `ClusterError` for what cannot be."""
    gone, there = set(options.without), set(cluster.ranks)
    if not gone < there:
        raise ClusterError(
            f"--without {sorted(gone)}: the cluster has ranks {sorted(there)}; name some of them, not all"
        )
    found = cluster.with_rates(dict(map(_rate, options.rate))).without(options.without)
    return found if options.link is None else _with_link(found, options.link)


def changes_text(options: argparse.Namespace) -> str:
    """Return the changes as they were asked for."""
    gone = " ".join(map(str, options.without))
    parts = [f"without {gone}" if gone else "", *(f"rate {rate}" for rate in options.rate)]
    parts.append("" if options.link is None else f"link {options.link}")
    return ", ".join(part for part in parts if part)


def _rate(text: str) -> tuple[int, float]:
    rank, _, rate = text.partition("=")
    try:
        return int(rank), float(rate)
    except ValueError:
        raise ClusterError(f"{text!r} is not a rank and its straggling rate; write it like --rate 2=2.5") from None


def _with_link(cluster: Cluster, text: str) -> Cluster:
    if len({device.node for device in cluster.devices}) == 1:
        raise ClusterError(f"--link {text} is the link between nodes, but the cluster has one node only")
    return replace(cluster, inter=Link(parse_rate(text) / 8, cluster.inter.latency_seconds))
