"""The network of a run: a namespace of its own, whose loopback can be slow, or pass nothing, while the run goes on."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time

from tests.chaos_record import ChaosError, Span

CLONE_NEWNET = 0x40000000  # linux/sched.h
PACKET_BYTES = 1500  # as between machines; the loopback's own 64 KiB would leave nothing to be slow
SLOW_BITS_PER_SECOND = (1_000_000, 4_000_000)  # a step of the script sends about 90 kB

_UP = ("ip", "link", "set", "dev", "lo", "mtu", str(PACKET_BYTES), "up")
_MEND = ("tc", "qdisc", "delete", "dev", "lo", "root")
_CUT = ("tc", "qdisc", "replace", "dev", "lo", "root", "blackhole")
_SECONDS = 30.0


def _slow(bits_per_second: int) -> tuple[str, ...]:
    """A bucket of 16 KiB, refilled at this rate; what would wait for longer than 0.2 s is lost, and sent again."""
    limits = ("rate", f"{bits_per_second}bit", "burst", "16384", "latency", "200ms")
    return ("tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *limits)


class Network:
    """The network of a process that has entered it, and of those that it starts; it is gone once they are.

    When it was slow, or passed nothing, is noted in `spans`. `refusal` is why there is none here; empty where there is.
    """

    def __init__(self, spans: list[Span]) -> None:
        self.refusal, self._spans = _refusal(), spans
        self._process, self._since = 0, 0.0

    def enter(self) -> None:
        """Give this process a network of its own, with nothing but a loopback. Raises OSError."""
        if not self.refusal:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "no network of its own")
            subprocess.run(_UP, check=True, timeout=_SECONDS)

    def belongs_to(self, process: int) -> None:
        """Name a process that has entered it, or is about to."""
        self._process = process

    def slow(self, bits_per_second: int) -> None:
        """Let no more than this through."""
        self._trouble(_slow(bits_per_second))

    def cut(self) -> None:
        """Lose all that is sent."""
        self._trouble(_CUT)

    def mend(self) -> None:
        """Let everything through again."""
        self._inside(_MEND, check=False)  # where the run has ended, its network is gone
        self._spans.append(Span(self._since, time.monotonic()))

    def _trouble(self, command: tuple[str, ...]) -> None:
        self._since = time.monotonic()
        self._inside(command)

    def _inside(self, command: tuple[str, ...], check: bool = True) -> None:
        enter = ("nsenter", f"--net=/proc/{self._process}/ns/net")
        made = subprocess.run([*enter, *command], capture_output=True, text=True, check=False, timeout=_SECONDS)
        if check and made.returncode:
            raise ChaosError(f"{' '.join(command)!r} ended with {made.returncode}: {made.stderr.strip()}")


def _refusal() -> str:
    """Do all of it once in a namespace that is gone at once; returns what is said against it."""
    if os.geteuid():
        return "only root may make a network of its own"
    every = (_UP, _slow(SLOW_BITS_PER_SECOND[0]), _CUT, _MEND)
    words = ["unshare", "--net", "sh", "-ec", "\n".join(map(" ".join, every))]
    try:
        made = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (made.stderr.strip() or f"status {made.returncode}") if made.returncode else ""
