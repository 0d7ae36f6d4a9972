"""Several nodes on one machine: network namespaces joined by links of a given rate.

Two nodes stand at the ends of one virtual cable; more meet at a bridge, which has a namespace of its own. So
everything disappears with the namespaces, and nothing is added to the machine's own network.
"""

from __future__ import annotations

import shutil
import subprocess

from hetu_fx.errors import EnvironmentProblem
from hetu_fx_emulate.spec import EmulateSpec

INTERFACE = "eth0"
Command = tuple[str, ...]


def namespace(name: str, node: int) -> str:
    """Name the network namespace of a node of the run `name`."""
    return f"{name}-node{node}"


def address(node: int) -> str:
    """Return the address of a node in the run's private network."""
    return f"10.77.0.{node + 1}"


def network_commands(name: str, spec: EmulateSpec) -> tuple[Command, ...]:
    """List the commands that build the nodes' network, in order; none for one node."""
    if spec.num_nodes == 1:
        return ()
    nodes = [namespace(name, node) for node in range(spec.num_nodes)]
    cables = _one_cable(nodes) if len(nodes) == 2 else _star(f"{name}-bridge", nodes)
    commands: list[Command] = [("ip", "netns", "add", node) for node in nodes]
    commands += cables
    for node, inside in enumerate(nodes):
        commands += [
            ("ip", "-n", inside, "address", "add", f"{address(node)}/24", "dev", INTERFACE),
            ("ip", "-n", inside, "link", "set", "lo", "up"),
            ("ip", "-n", inside, "link", "set", INTERFACE, "up"),
        ]
        commands += _limit(inside, INTERFACE, spec)
        if len(nodes) > 2:
            commands += _limit(f"{name}-bridge", f"port{node}", spec)
    return tuple(commands)


def check_tools() -> None:
    """Raise EnvironmentProblem if a program that the nodes need is missing."""
    packages = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
    missing = [tool for tool in packages if shutil.which(tool) is None]
    if missing:
        wanted = " ".join(sorted({packages[tool] for tool in missing}))
        raise EnvironmentProblem(
            f"--nodes needs {', '.join(missing)}, which PATH does not have\n"
            f"hint: on Debian and Ubuntu: apt install {wanted}"
        )


def run_command(command: Command) -> None:
    """Run one command; raises EnvironmentProblem with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise EnvironmentProblem(
            f"cannot build the network of --nodes: {' '.join(command)!r} said: {said}\n"
            "hint: run as root, on a kernel with veth (and bridge for more than two nodes, sch_tbf for --link)"
        )


def _one_cable(nodes: list[str]) -> list[Command]:
    first, second = nodes
    ends = ("type", "veth", "peer", "name", INTERFACE, "netns", second)
    return [("ip", "link", "add", "name", INTERFACE, "netns", first, *ends)]


def _star(bridge: str, nodes: list[str]) -> list[Command]:
    commands: list[Command] = [
        ("ip", "netns", "add", bridge),
        ("ip", "-n", bridge, "link", "add", "br0", "type", "bridge"),
        ("ip", "-n", bridge, "link", "set", "br0", "up"),
    ]
    for node, inside in enumerate(nodes):
        ends = ("type", "veth", "peer", "name", f"port{node}", "netns", bridge)
        commands.append(("ip", "link", "add", "name", INTERFACE, "netns", inside, *ends))
        commands.append(("ip", "-n", bridge, "link", "set", f"port{node}", "master", "br0", "up"))
    return commands


def _limit(inside: str, interface: str, spec: EmulateSpec) -> list[Command]:
    """Limit what leaves an interface; both ends of a cable have one, so both ways are limited."""
    rate = spec.link_bits_per_second
    if rate is None:
        return []
    # A bucket must hold what a slow kernel clock (100 per second) lets through between two ticks.
    burst = max(16_384, round(rate / 8 / 100))
    limits = ("rate", f"{round(rate)}bit", "burst", str(burst), "latency", "100ms")
    return [("tc", "-n", inside, "qdisc", "add", "dev", interface, "root", "tbf", *limits)]
