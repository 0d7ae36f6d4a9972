"""Which machine, network and process this is, told so that no two are taken for one.

A hostname is no machine: clones of a virtual machine and containers have one name, and ids of processes mean something
in one of them only. What the kernel drew at its start tells machines apart, and its namespaces the containers on one.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

NODE_VARIABLE = "HETU_FX_NODE"

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")
_DIGEST_LENGTH = 12
_WITH_DIGEST = re.compile(rf"(.+)@[0-9a-f]{{{_DIGEST_LENGTH}}}")


def node_name() -> str:
    """Return HETU_FX_NODE (emulated nodes share one machine), else a name that this machine alone has.

    It is the hostname and, after an @, a digest of the boot and of the namespace of processes: ids of processes hold
    for all that have this name. People are shown `short_names`.
    """
    return os.environ.get(NODE_VARIABLE) or f"{socket.gethostname()}@{_digest('pid')}"


def memory_name() -> str:
    """Return HETU_FX_NODE, else the hostname: where a machine finds what it has kept, in a new container or boot too.

    Machines of one name have folders of one name, each on its own disks; on shared ones files have names of their own.
    """
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


def network_name() -> str:
    """Return a name that those processes have which share this one's network, and so its loopback."""
    return f"network@{_digest('net')}"


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names of nodes as people know them: by hostname alone, where no other of these nodes has it."""
    hosts = {name: found[1] if (found := _WITH_DIGEST.fullmatch(name)) else name for name in names}
    count = Counter(hosts.values())
    return [hosts[name] if count[hosts[name]] == 1 else name for name in names]


def pid_namespace() -> int:
    """Return the number of the namespace in which ids of processes hold; 0 where the system has none."""
    namespace = Path("/proc/self/ns/pid")
    return namespace.stat().st_ino if namespace.exists() else 0


def start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold anything; the 22nd is the start.
    return int(stat.rpartition(")")[2].split()[19])


def _digest(namespace: str) -> str:
    """Hash what tells this boot, and a namespace in it, from all others; the hostname where the system has no /proc."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    of_process = _NAMESPACES / namespace
    place = of_process.stat().st_ino if of_process.exists() else 0
    return hashlib.sha256(f"{boot} {place}".encode()).hexdigest()[:_DIGEST_LENGTH]
