"""What a device of each type is reached by: the one place that knows torch's types of devices.

A type is what `torch.device(...).type` says: it names the part of torch that drives a device ("cuda", "cpu"). It is not
what a cluster file calls a kind ("nvidia-h100"), which is the name of a chip that this part drives.

A package adds a type by an entry point of the group `hetu_fx.kinds`, which loads a `DeviceType`, and a script by its
`register`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from hetu_fx.errors import EnvironmentProblem

HOST = torch.device("cpu")
GROUP = "hetu_fx.kinds"


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one device.

    Attributes:
        name: the same for all ranks that use this device, and for no others.
        total_bytes: how large it is.
        free_bytes: what this process can still have.
        peak_bytes: the most that this process has had so far.
    """

    name: str
    total_bytes: int
    free_bytes: int
    peak_bytes: int


def _nothing(device: torch.device) -> None:
    """Do nothing: such a device has done its work when a call comes back."""


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """What is to be known of a type of devices.

    Attributes:
        name: torch's name of the type.
        count: how many devices of the type this process sees.
        chip: the name of a device's chip, as cluster files have it.
        memory: tells of a device's memory; None: it is the host's.
        synchronize: waits until a device has done what it was given.
        events: the module with `Event` and `current_stream`, by which its work is timed; None: by the host's clock.
        graphs: the module with `CUDAGraph`, `graph` and `graph_pool_handle`, by which its work is recorded and
            replayed; None: it cannot be.
        random_state: the state of the generator that its random ops draw from; None: the host's, or not used yet.
        set_random_state: sets it.
        process_groups: torch.distributed's backend for groups of such devices.
        is_direct: messages leave from where a tensor is; else they are staged through the host.
        pins_host: host memory can be pinned for it, from and to which copies are faster, and run beside the host.
        autocast_key: the dispatch key of the casts that torch.autocast makes for the type; None: it makes none.
        no_dtypes: what the type cannot compute in.
        lacks: names of ops that it does not have, such as aten.topk.default: they run on the host.
        product_side: of float32 matrices whose product takes about a millisecond.
        large_elements: of a tensor that no cache holds.
    """

    name: str
    count: Callable[[], int]
    chip: Callable[[torch.device], str]
    memory: Callable[[torch.device], Memory] | None = None
    synchronize: Callable[[torch.device], None] = _nothing
    events: Callable[[], Any] | None = None
    graphs: Callable[[], Any] | None = None
    random_state: Callable[[], Tensor | None] = lambda: None
    set_random_state: Callable[[Tensor], None] = lambda _: None
    process_groups: str = "gloo"
    is_direct: bool = False
    pins_host: bool = False
    autocast_key: str | None = None
    no_dtypes: Collection[torch.dtype] = field(default_factory=frozenset)
    lacks: Collection[str] = field(default_factory=frozenset)
    product_side: int = 256
    large_elements: int = 1 << 20

    def register(self) -> None:
        """Make the type known.

        Raises:
            EnvironmentProblem: another one has its name.
        """
        if _types.known.setdefault(self.name, self) is not self:
            raise EnvironmentProblem(f"device type {self.name!r} is known already\nhint: register each once")

    @staticmethod
    def group_backends() -> str:
        """Return what torch.distributed is to be initialised with, for the host and all else that is there."""
        own = [f"{one.name}:{one.process_groups}" for one in computing() if one.is_direct]
        return ",".join([*own, "cpu:gloo"]) if own else CPU.process_groups

    def __post_init__(self) -> None:
        if isinstance(self.lacks, str):
            raise EnvironmentProblem(f"device type {self.name!r}: 'lacks' must be a set of names, not {self.lacks!r}")


def _cuda_memory(device: torch.device) -> Memory:
    properties = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(
        name=f"cuda {getattr(properties, 'uuid', device)}",
        total_bytes=int(properties.total_memory),
        free_bytes=int(free) + cached,
        peak_bytes=torch.cuda.max_memory_allocated(device),
    )


CPU = DeviceType(
    name="cpu",
    count=lambda: 1,
    chip=lambda _: "cpu",
    random_state=torch.get_rng_state,
    set_random_state=torch.set_rng_state,
    is_direct=True,
    autocast_key="AutocastCPU",
)
CUDA = DeviceType(
    name="cuda",
    count=torch.cuda.device_count,
    chip=lambda device: torch.cuda.get_device_name(device).lower().replace(" ", "-"),
    memory=_cuda_memory,
    synchronize=torch.cuda.synchronize,
    events=lambda: torch.cuda,
    graphs=lambda: torch.cuda,
    random_state=lambda: torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    set_random_state=torch.cuda.set_rng_state,
    process_groups="nccl",
    is_direct=True,
    pins_host=True,
    autocast_key="AutocastCUDA",
    product_side=4096,
    large_elements=1 << 26,
)


class _Types:
    """The types that are known, by name, and whether the entry points of packages have been looked at."""

    def __init__(self, *known: DeviceType) -> None:
        self.known = {one.name: one for one in known}
        self.has_looked = False


_types = _Types(CPU, CUDA)


def device_types() -> tuple[DeviceType, ...]:
    """Return all that are known, the host's first.

    Raises:
        EnvironmentProblem: a package has an entry point that gives none.
    """
    if not _types.has_looked:
        _types.has_looked = True
        for point in metadata.entry_points(group=GROUP):
            _loaded(point).register()
    return tuple(_types.known.values())


def _loaded(point: metadata.EntryPoint) -> DeviceType:
    try:
        found = point.load()
    except Exception as error:
        raise EnvironmentProblem(f"entry point {point.name!r} of {GROUP} does not load: {error}") from error
    if not isinstance(found, DeviceType):
        raise EnvironmentProblem(f"entry point {point.name!r} of {GROUP} gives {found!r}, but must give a DeviceType")
    return found


def device_type_record(device: torch.device) -> DeviceType:
    """Return the record of a device's type.

    Raises:
        EnvironmentProblem: there is none.
    """
    found = _types.known.get(device.type) or next((one for one in device_types() if one.name == device.type), None)
    if found is None:
        raise EnvironmentProblem(
            f"devices of type {device.type!r} are not known, only {sorted(_types.known)}\n"
            f"hint: add a DeviceType by an entry point of the group {GROUP!r}, or by hetu_fx.DeviceType(...).register()"
        )
    return found


def is_elsewhere(device: torch.device) -> bool:
    """Tell whether tensors of a device are not in the host's memory, and have values."""
    return device.type not in (HOST.type, "meta")


def own_device(asked: torch.device | str | None) -> torch.device:
    """Return the device of this process: as it was asked for, else of the first type of which there are some.

    Of several of a type it is that of the process's rank on its host.
    """
    found = torch.device(next((one.name for one in computing()), HOST.type) if asked is None else asked)
    if found.index is not None or found.type == HOST.type:
        return found
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", "0")))


def computing() -> tuple[DeviceType, ...]:
    """Return the types of which this process sees devices, besides the host's."""
    return tuple(one for one in device_types() if one.name != HOST.type and one.count() > 0)
