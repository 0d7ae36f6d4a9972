"""Leaves torch.distributed in order when the process ends.

The threads of gloo hold the tensors of messages. One that frees a tensor while the interpreter is finalised asks for
python's lock, is ended for that in the middle of a destructor, and aborts the process ("terminate called without an
active exception"; pytorch issue 190489, seen in torch 2.13). A process group that is freed earlier waits for its
threads. destroy_process_group frees only those that nobody else holds, and group tables hold theirs.
"""

from __future__ import annotations

import atexit
import sys
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world


class HoldsGroups(Protocol):
    """What has process groups, and can let them go."""

    def release(self) -> None: ...


class UsesGroups(Protocol):
    """What uses process groups in a thread, and can wait until it does not."""

    def finish(self) -> None: ...


_holders: WeakSet[HoldsGroups] = WeakSet()
_users: WeakSet[UsesGroups] = WeakSet()


def release_at_exit(holder: HoldsGroups) -> None:
    """Have `holder` let its groups go, if it is still there when the process ends."""
    _holders.add(holder)


def finish_at_exit(user: UsesGroups) -> None:
    """Have `user` finish before groups are let go, if it is still there when the process ends."""
    _users.add(user)


@atexit.register
def _leave() -> None:
    """Free all groups, which waits for their messages under way (bounded by their time-outs), and leave the world.

    After an error nothing is waited for, so that the peers notice at once.
    """
    if _holders and not hasattr(sys, "last_type"):
        leave_world()


def leave_world() -> None:
    """Free all groups, and leave the world; another one can be joined then."""
    for user in _users:
        user.finish()
    for holder in _holders:
        holder.release()
    _clear_defaults()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Torch names groups by their number: a start that failed half-way must not count in the next world.
    _world.group_count = 0


def _clear_defaults() -> None:
    """Let go the world that functions of torch have as a default argument if they were imported when it was there."""
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module else ():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(default, ProcessGroup) for default in defaults):
            function.__defaults__ = tuple(None if isinstance(value, ProcessGroup) else value for value in defaults)
