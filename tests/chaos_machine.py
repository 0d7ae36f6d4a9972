"""What a run stands on, and can be taken from it while it goes on: network, disk, shared memory, memory."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from hetu_fx.checkpoint.snapshot_folders import SHARED_MEMORY
from hetu_fx.errors import EnvironmentProblem
from hetu_fx_emulate.cleanup import remove_run, run_name
from hetu_fx_emulate.limits import (
    Affinity,
    cgroup_bases,
    controller_settings,
    memory_settings,
    rank_folders,
    this_limiter,
)
from hetu_fx_emulate.spec import EmulateSpec
from tests.chaos_record import ChaosError, Span

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000  # linux/sched.h
PACKET_BYTES = 1500  # as between machines; the loopback's own 64 KiB would leave nothing to be slow
SLOW_BITS_PER_SECOND = (1_000_000, 4_000_000)  # a step of the script sends about 90 kB

_UP = ("ip", "link", "set", "dev", "lo", "mtu", str(PACKET_BYTES), "up")
_MEND = ("tc", "qdisc", "delete", "dev", "lo", "root")
_CUT = ("tc", "qdisc", "replace", "dev", "lo", "root", "blackhole")
_SECONDS = 30.0

SPACE_MIB = 16
PAGE_BYTES = 4096  # the least that can be said of memory
_WITH_MEMORY = EmulateSpec(speeds=(1.0,), memory=(1 << 20,))
_serials = itertools.count()


def _slow(bits_per_second: int) -> tuple[str, ...]:
    """A bucket of 16 KiB, refilled at this rate; what would wait for longer than 0.2 s is lost, and sent again."""
    limits = ("rate", f"{bits_per_second}bit", "burst", "16384", "latency", "200ms")
    return ("tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *limits)


class Network:
    """The network of a process that has entered it, and of those that it starts; it is gone once they are.

    When it was slow, or passed nothing, is noted in `spans`. `refusal` is why there is none here; empty where there is.
    """

    def __init__(self, spans: list[Span]) -> None:
        self.refusal, self._spans = _network_refusal(), spans
        self._process, self._since = 0, 0.0

    def enter(self) -> None:
        """Give this process a network of its own, with nothing but a loopback. Raises OSError."""
        if not self.refusal:
            _leave_namespace(CLONE_NEWNET)
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


def _network_refusal() -> str:
    """Do all of it once in a namespace that is gone at once; returns what is said against it."""
    every = (_UP, _slow(SLOW_BITS_PER_SECOND[0]), _CUT, _MEND)
    return _refusal_of("unshare", "--net", "sh", "-ec", "\n".join(map(" ".join, every)))


class Space:
    """Where files are; `refusal` is why it is nothing of a run's own, and so must not be filled: empty where it is."""

    def __init__(self, folder: Path, refusal: str) -> None:
        self.folder, self.refusal = folder, refusal

    def fill(self) -> None:
        """Leave no space; again, where something has been removed meanwhile."""
        with suppress(OSError), (self.folder / "ballast").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Give the space back."""
        (self.folder / "ballast").unlink(missing_ok=True)  # a namespace is gone with its run


class Disk(Space):
    """The file system that a run saves to: a small one, where this user may mount one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        super().__init__(folder, _refusal_of(*_mount(folder)))

    def close(self) -> None:
        """Unmount it."""
        if not self.refusal:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class SharedMemory(Space):
    """The shared memory of processes that have entered it, and of those that they start: a small one."""

    def __init__(self) -> None:
        super().__init__(SHARED_MEMORY, _refusal_of(*_IN_ITS_OWN_MEMORY, "true"))

    def command(self) -> tuple[str, ...]:
        """Return what a command is to begin with to be run in a shared memory of its own, where it may."""
        return () if self.refusal else _IN_ITS_OWN_MEMORY

    def enter(self) -> None:
        """Give this process a shared memory of its own. Raises OSError."""
        if not self.refusal:
            _leave_namespace(CLONE_NEWNS)
            for command in (("mount", "--make-rprivate", "/"), _mount(SHARED_MEMORY)):
                subprocess.run(command, check=True, timeout=_SECONDS)

    def belongs_to(self, process: int) -> None:
        """Name a process that has entered it, or is about to."""
        if not self.refusal:
            self.folder = Path(f"/proc/{process}/root{SHARED_MEMORY}")


class MemoryLimits:
    """Cgroups in which processes get no more memory; `refusal` is why there are none, empty where there are."""

    def __init__(self) -> None:
        self._limiter, self._name = this_limiter(), run_name(next(_serials))
        self.refusal = self._tried()
        self.close()

    def starve(self, process: int, more_bytes: int = PAGE_BYTES) -> None:
        """Let a process have so much more memory than it has: the kernel kills it once it needs more."""
        limiter, name = self._limiter, self._name
        *_, folder = rank_folders(limiter, name, process)
        folder.parent.mkdir(exist_ok=True)
        for setting in controller_settings(limiter, name, _WITH_MEMORY):
            setting.write()
        folder.mkdir()
        for setting in memory_settings(limiter, name, process, more_bytes):
            setting.write()
        (folder / "cgroup.procs").write_text(str(process))

    def close(self) -> None:
        """Leave nothing behind; processes that are still in one of them end."""
        remove_run(self._name, cgroup_bases(self._limiter))

    def _tried(self) -> str:
        """Starve a process that needs nothing any more; returns what is said against it."""
        if isinstance(self._limiter, Affinity):
            return self._limiter.reason
        with subprocess.Popen(["sleep", "60"]) as sleeper:
            try:
                self.starve(sleeper.pid)
            except (OSError, EnvironmentProblem) as error:
                return str(error)
            finally:
                sleeper.kill()
        return ""


def _leave_namespace(kind: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(kind):
        raise OSError(ctypes.get_errno(), "no namespace of its own")


def _mount(folder: Path) -> tuple[str, ...]:
    return ("mount", "-t", "tmpfs", "-o", f"size={SPACE_MIB}m", "tmpfs", str(folder))


_IN_ITS_OWN_MEMORY = ("unshare", "--mount", "sh", "-ec", f'{" ".join(_mount(SHARED_MEMORY))}; exec "$@"', "sh")


def _refusal_of(*command: str) -> str:
    """Run a command that only root may run; returns what is said against it."""
    if os.geteuid():
        return f"only root may {command[0]}"
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (made.stderr.strip() or f"status {made.returncode}") if made.returncode else ""
