"""Ends communication: in order when the process ends, or at once, so that whoever waits in it gets an error.

The threads of gloo hold the tensors of messages. One that frees a tensor while the interpreter is finalised asks for
python's lock, is ended for that in the middle of a destructor, and aborts the process ("terminate called without an
active exception"; pytorch issue 190489, seen in torch 2.13). A process group that is freed earlier waits for its
threads. destroy_process_group frees only those that nobody else holds, and group tables hold theirs.

Gloo cannot be aborted: a message with a peer that lives but does not come, or is stopped, waits for its time-out, and
destroying its group waits for it (pytorch issue 130345, seen in torch 2.13). But a connection that is shut down fails
all that waits for it, here and at the other end. So the sockets that groups open are remembered. A backend that sends
from devices (NCCL) is aborted.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hetu_fx.base.device_types import device_types
from hetu_fx.base.torch_private import abort_together, forget_group_count, group_backend, is_gloo

if TYPE_CHECKING:
    from hetu_fx.comm_ops.wire.common_path import CommonPath


class HoldsGroups(Protocol):
    """What has process groups, and can let them go."""

    def release(self) -> None: ...


class UsesGroups(Protocol):
    """What uses process groups in a thread, and can wait until it does not."""

    def finish(self) -> None: ...


_FOLDER = "/proc/self/fd"


class Communication:
    """What communicates in this process, and its groups' connections.

    Attributes:
        holders: what lets its groups go, if it is still there when the process ends.
        users: what is to finish before.
        paths: what watches the ranks of a group.
        lock: of all that follows.
        known: the sockets, by the kernel's names.
        ours: groups all of whose connections are known.
        aborted: groups whose devices' messages were ended.
        before: what was open when each recording under way began.
    """

    def __init__(self) -> None:
        self.holders: WeakSet[HoldsGroups] = WeakSet()
        self.users: WeakSet[UsesGroups] = WeakSet()
        self.paths: WeakKeyDictionary[ProcessGroup, CommonPath] = WeakKeyDictionary()
        self.lock = threading.Lock()
        self.known: set[str] = set()
        self.ours: WeakSet[ProcessGroup] = WeakSet()
        self.aborted: WeakSet[ProcessGroup] = WeakSet()
        self.before: list[set[str]] = []

    def taken(self) -> list[int]:
        """Return the file descriptors of the sockets that are open, and forget these."""
        with self.lock:
            found = _sockets().items()
            taken = [fd for name, fd in found if name in self.known or any(name not in b for b in self.before)]
            self.known.clear()
        return taken

    def newly_aborted(self) -> list[Any]:
        """Return the devices' backends of groups that were not aborted before."""
        with self.lock:
            backends = [backend for group in self.ours if group not in self.aborted for backend in _of_devices(group)]
            self.aborted.update(self.ours)
        return backends


communication = Communication()


def release_at_exit(holder: HoldsGroups) -> None:
    """Have `holder` let its groups go, if it is still there when the process ends."""
    communication.holders.add(holder)


def finish_at_exit(user: UsesGroups) -> None:
    """Have `user` finish before groups are let go, if it is still there when the process ends."""
    communication.users.add(user)


@atexit.register
def _leave() -> None:
    """Free all groups, which waits for their messages under way (bounded by their time-outs), and leave the world.

    After an error nothing is waited for, so that the peers notice at once.
    """
    if communication.holders and not hasattr(sys, "last_type"):
        leave_world()


def leave_world() -> None:
    """Free all groups, and leave the world; another one can be joined then."""
    for user in communication.users:
        user.finish()
    for holder in communication.holders:
        holder.release()
    _clear_defaults()
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_group_count()  # a start that failed half-way must not count in the next world


def _clear_defaults() -> None:
    """Let go the world that functions of torch have as a default argument if they were imported when it was there."""
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module else ():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(default, ProcessGroup) for default in defaults):
            function.__defaults__ = tuple(None if isinstance(value, ProcessGroup) else value for value in defaults)


@contextmanager
def opening_connections() -> Iterator[None]:
    """Remember the sockets that are opened in the block; `sever` ends them even while it still runs."""
    before = set(_sockets())
    with communication.lock:
        communication.before.append(before)
    try:
        yield
    finally:
        with communication.lock:
            communication.before.remove(before)
            communication.known.update(set(_sockets()) - before)


def remember(group: ProcessGroup) -> ProcessGroup:
    """Note that all connections of a group were opened inside `opening_connections`, and return it."""
    communication.ours.add(group)
    return group


def can_sever(group: ProcessGroup) -> bool:
    """Tell whether `sever` ends the messages of a group: the user's own groups are left alone."""
    return group in communication.ours


def sever() -> int:
    """Shut down the connections of all groups of this process, from any thread; returns how many. Devices' are aborted.

    Nothing can be communicated any more until the process has left its groups and joined others.
    """
    taken = communication.taken()
    if backends := communication.newly_aborted():
        abort_together(backends)
    return sum(map(_shut_down, taken))


def _of_devices(group: ProcessGroup) -> Iterator[Any]:
    """List the backends by which a group sends from devices."""
    for kind in device_types():
        with suppress(RuntimeError):  # it has none for this type
            backend = group_backend(group, torch.device(kind.name))
            if not is_gloo(backend):
                yield backend


def _sockets() -> dict[str, int]:
    """Return the file descriptors of open sockets by the kernel's name of each; none where it does not list them."""
    found: dict[str, int] = {}
    for entry in os.listdir(_FOLDER) if os.path.isdir(_FOLDER) else ():
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(f"{_FOLDER}/{entry}")
            if name.startswith("socket:"):
                found[name] = int(entry)
    return found


def _shut_down(fd: int) -> bool:
    with suppress(OSError):  # closed meanwhile, or not connected
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family == socket.AF_UNIX or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
