"""One process group, as torch.distributed has it: created under a given name, and asked what it can do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hetu_fx.base.device_types import device_types
from hetu_fx.base.torch_private import (
    get_default_group,
    gloo_devices,
    group_backend,
    is_gloo,
    make_gloo_device,
    new_named_group,
    timeout_of_backend,
)
from hetu_fx.comm_ops.wire.rendezvous import meet
from hetu_fx.comm_ops.wire.shutdown import opening_connections, remember


@dataclass(frozen=True, slots=True)
class GroupCreation:
    """What it took to create the group of logical `ranks`.

    Under gloo that is to connect all members; NCCL connects at the first message, which then takes longer.
    """

    ranks: tuple[int, ...]
    seconds: float


def create_world(backend: str, rank: int, world: int, timeout: timedelta | None = None) -> None:
    """Do what init_process_group does for a start by a launcher; gloo is reached where the other ranks reach this one.

    Args:
        backend: of the group.
        rank: of this process.
        world: number of ranks.
        timeout: bound of the group's waits (None: torch's).

    Raises:
        EnvironmentProblem: on all ranks, where some cannot reach each other.
    """
    with opening_connections():
        store, address = meet(rank, world)
        with gloo_devices(None if address is None else [make_gloo_device(address)]):
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        remember(get_default_group())


def create_group(members: list[int], name: str, timeout: timedelta) -> ProcessGroup:
    """Do what new_group(use_local_synchronization=True) does, but under a name that all members agree on.

    new_group hashes the number of groups that the process has made so far into the name, so ranks that are in
    unequal numbers of groups (the normal case for unequal devices) never meet (seen in torch 2.13).
    """
    with opening_connections():
        return remember(new_named_group(members, members.index(dist.get_rank()), name, timeout))


def world_group() -> ProcessGroup | None:
    """Return the group of all ranks; None without torch.distributed."""
    return get_default_group() if dist.is_available() and dist.is_initialized() else None


def group_timeout(group: ProcessGroup | None) -> timedelta:
    """Return the bound of a group's waits: of the first of its backends that has one, else torch's own."""
    if group is None:
        return timedelta(minutes=30)
    for kind in device_types():
        try:
            return timeout_of_backend(group_backend(group, torch.device(kind.name)))
        except RuntimeError:  # the group has no backend for this kind of device
            continue
    return timedelta(minutes=30)


def has_native_backend(group: ProcessGroup, device: torch.device) -> bool:
    """Tell whether a group sends tensors of `device` from where they are."""
    try:
        backend = group_backend(group, device)
    except RuntimeError:  # the group has no backend for this kind of device
        return False
    return not is_gloo(backend)
