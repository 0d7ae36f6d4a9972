"""At which address each rank is reached: the one from which it reaches the rendezvous.

The name of a machine is no address: Debian and Ubuntu let it stand for 127.0.1.1 on that machine, and others cannot
dial that. A machine that has reached the rendezvous has told the kernel which of its addresses leads there. The one on
which the rendezvous is may see it at its own loopback only; its address is the one that the others dial.

Ranks of one network (all on one machine, in no container of its own) meet at the loopback, which nobody else reaches.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetu_fx.base.machine import network_name
from hetu_fx.base.torch_private import host_of_world
from hetu_fx.errors import EnvironmentProblem

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = ("localhost", LOOPBACK)
VARIABLE = "GLOO_SOCKET_IFNAME"
"""Of the environment: the interface to use, gloo's own word for it."""

ANYWHERE = "192.0.2.1"  # of no machine (RFC 5737): the way there is the way to other networks
_PORT = 9  # nothing is sent to it
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IPV6_FILE = Path("/proc/net/if_inet6")


@dataclass(frozen=True, slots=True)
class Contact:
    """How a rank reaches the rendezvous.

    Attributes:
        network: of the rank; ranks of one network reach each other at the loopback.
        source: this machine's address on the way there; a loopback one where the rendezvous is here, or nowhere.
        target: the address that it dials; "" where there is no rendezvous over a network.
    """

    network: str
    source: str
    target: str = ""

    @classmethod
    def own(cls, host: str | None = None) -> Contact:
        """Find out for this process; `host` of the rendezvous (None: of the world, or as the launcher says).

        Raises EnvironmentProblem for an interface that this machine does not have.
        """
        wanted = host or host_of_world() or os.environ.get("MASTER_ADDR")
        source, target = _way_to(wanted or ANYWHERE)
        given = os.environ.get(VARIABLE, "").split(",")[0]
        return cls(network_name(), _address_of(given) if given else source, target if wanted else "")


def rank_addresses(reaches: Sequence[Contact]) -> tuple[str, ...]:
    """Return the address of each rank, by how all of them reach the rendezvous; alike on all ranks.

    Raises EnvironmentProblem where others cannot dial one.
    """
    if len({reach.network for reach in reaches}) == 1:
        return (LOOPBACK,) * len(reaches)
    dialled = next((reach.target for reach in reaches if reach.target and not is_loopback(reach.target)), None)
    found = [dialled if is_loopback(reach.source) else reach.source for reach in reaches]
    if None in found:
        raise EnvironmentProblem(
            f"rank {found.index(None)} knows no address of its machine but {reaches[found.index(None)].source}, which "
            f"other machines cannot reach\nhint: set MASTER_ADDR to an address of the first machine, or {VARIABLE} on "
            f"each machine to the interface that leads to the others (see 'ip address')"
        )
    return tuple(address for address in found if address is not None)


def socket_family(address: str) -> socket.AddressFamily:
    """Return the family of sockets for an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _way_to(host: str) -> tuple[str, str]:
    """Return this machine's address on the way to a host, and the host's; the loopback and "" where there is no way.

    Nothing is sent. Who has met there has a way; elsewhere it matters only where ranks are on several networks.
    """
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as way:  # by the other family it may have one
                way.connect(address)
                return str(way.getsockname()[0]), str(address[0])
    return LOOPBACK, ""


def _address_of(interface: str) -> str:
    """Return the address of an interface, IPv4 if it has one."""
    import fcntl  # not on every system; where it is missing gloo names no interfaces either

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)[20:24])
    for line in _IPV6_FILE.read_text().splitlines() if _IPV6_FILE.exists() else ():
        number, _, _, scope, _, name = line.split()
        if name == interface and scope in ("00", "10"):  # of the whole network, or the loopback
            return str(ipaddress.IPv6Address(bytes.fromhex(number)))
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise EnvironmentProblem(
        f"{VARIABLE} is {interface!r}, but this machine has no interface of that name with an address; it has {known}\n"
        f"hint: set {VARIABLE} to one of them, or unset it"
    )


def is_loopback(address: str) -> bool:
    """Tell whether an address leads nowhere but to the machine itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
