"""Machines on this one: network, hostname, processes and memory of their own, joined by a bridge. For root.

Each is one process that holds its namespaces and dies as a whole by one kill.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SECONDS = 30.0
PREFIX = "10.77.0"

_BE_MACHINE = """
hostname "$1"; mount -t proc proc /proc; mount -t tmpfs -o size=256m tmpfs /dev/shm; mount --bind "$2" /etc/hosts
shift 2; exec "$@"
"""


@dataclass(frozen=True)
class Machine:
    """A machine: `address` on the bridge, `hostname`, and `hosts`, the file that is its /etc/hosts."""

    namespace: str
    address: str
    hostname: str
    hosts: Path

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command on it; whatever that starts ends with it."""
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "-u", "-i", "-p", "-f", "--kill-child", "-m"]
        be = ["--propagation", "private", "sh", "-ec", _BE_MACHINE, "-", self.hostname, str(self.hosts), *command]
        plain = {
            name: value for name, value in os.environ.items() if name not in ("HETU_FX_NODE", "GLOO_SOCKET_IFNAME")
        }
        return subprocess.Popen(
            [*inside, *be],
            env={**plain, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def refusal() -> str:
    """Return why there can be no machines here; empty where there can be."""
    if os.geteuid():
        return "only root may make machines of namespaces"
    if not all(map(shutil.which, ("ip", "unshare"))):
        return "ip (iproute2) and unshare (util-linux) are needed"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, timeout=SECONDS, check=False)
    return tried.stderr.strip()


@contextmanager
def machines(folder: Path, hostnames: Sequence[str], hosts: Mapping[int, str] | None = None) -> Iterator[list[Machine]]:
    """Give machines of these hostnames, which know each other by address, for one block.

    Args:
        folder: for their files.
        hostnames: one for each; they may be the same.
        hosts: what the /etc/hosts of a machine says besides, by its number.
    """
    own = f"hm{secrets.token_hex(3)}"  # new each time: the kernel takes away the links of a namespace some time later
    with ExitStack() as stack:
        _ip(stack, f"link add {own}b type bridge", f"link del {own}b")
        _ip(stack, f"link set {own}b up")
        found = []
        for number, hostname in enumerate(hostnames):
            name, address = f"{own}n{number}", f"{PREFIX}.{number + 1}"
            _ip(stack, f"netns add {name}", f"netns del {name}")
            _ip(stack, f"link add {own}v{number} type veth peer name eth0 netns {name}")
            _ip(stack, f"link set {own}v{number} master {own}b up")
            _ip(stack, f"-n {name} addr add {address}/24 dev eth0")
            _ip(stack, f"-n {name} link set eth0 up")
            _ip(stack, f"-n {name} link set lo up")
            file = folder / f"hosts_{number}"
            file.write_text(f"127.0.0.1 localhost\n{(hosts or {}).get(number, '')}\n")
            found.append(Machine(name, address, hostname, file))
        yield found


def _ip(stack: ExitStack, words: str, undo: str = "") -> None:
    subprocess.run(["ip", *words.split()], check=True, timeout=SECONDS, capture_output=True)
    if undo:
        stack.callback(subprocess.run, ["ip", *undo.split()], check=False, timeout=SECONDS, capture_output=True)
