"""A kind of device for tests: `testkind`, made by torch's Python backend for PrivateUse1.

Its tensors stand in host memory, but torch holds them for those of another device: they mix with none of the host,
`.cpu()` copies, autograd works on them in a thread of its own, and streams, events and messages know nothing of them.
Each op runs the host's kernel on the same memory, so that numbers are real and results have the bits of the host.
A tensor goes from one device to the other by its DLPack record, where only the device is written anew.

`install()` is for a process: torch can give PrivateUse1 one name, and not take it back.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hetu_fx.base.device_types import DeviceType, Memory
from tests.spawned import forked

NAME = "testkind"
PLACE = torch.device("privateuseone", 0)  # which is called so only once `install` has run
LACKS = frozenset({"aten.topk.default"})
MEMORY_BYTES = 1 << 30
SECONDS = 240  # that a test may take

_HOST, _OTHER = 1, 12  # DLPack's numbers of the host, and of PrivateUse1 (kDLExtDev)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

aten = torch.ops.aten
copied_bytes_per_second: float | None = None
"""How fast copies from and to the host are; None: as fast as memory is."""
calls: Counter[str] = Counter()
"""How often each op has run here."""


# Ops that take tensors of the host beside their own, on every device.
_MIXES = frozenset({aten.index.Tensor, aten._index_put_impl_.default, aten.index_put_.default})


class _Module:
    """What torch asks of `torch.testkind`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the host's."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Inside(threading.local):
    process = False  # whether this process was made for a test on the kind


_inside = _Inside()


def on_testkind(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own, in which the kind is known; what it raises fails here."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        if _inside.process:
            test(*args, **kwargs)
            return
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = forked(_alone, run, args, kwargs, sender)
        sender.close()
        try:
            assert receiver.poll(SECONDS), f"{test.__name__} said nothing for {SECONDS} s"
            told = receiver.recv()
        finally:
            process.kill()
            process.join()
        assert told is None, told

    return run


def _alone(test: Callable[..., None], args: Any, kwargs: Any, sender: Any) -> None:
    torch.set_num_threads(1)
    _inside.process = True
    install()
    try:
        test(*args, **kwargs)
        sender.send(None)
    except BaseException:
        sender.send(traceback.format_exc())
    os._exit(0)  # autograd's thread for the kind may hold python objects


@cache
def install() -> torch.device:
    """Make the kind known to torch in this process, once; return its one device."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    every_op, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every_op.fallback(_run, "PrivateUse1")
    every_op.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # it casts nothing
    for name, kernel in _OVERRIDEABLE.items():
        own.impl(name, kernel, "PrivateUse1")
    _kept.extend((every_op, own))
    RECORD.register()
    torch.Tensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    return PLACE


def on_host(x: Tensor) -> Tensor:
    """Return the same memory as a tensor of the host."""
    return _as_of(_HOST, x.detach()) if x.device.type == NAME else x


def is_direct() -> None:
    """Let messages leave from where tensors of the kind are, in this process from now on; as threads can send them."""
    object.__setattr__(RECORD, "is_direct", True)


def _memory(device: torch.device) -> Memory:
    return Memory(str(device), MEMORY_BYTES, MEMORY_BYTES, 0)


class _Graphs:
    """Records of what is computed on the kind: ops in order, with the memory that they read and write."""

    class CUDAGraph:
        """What a record holds."""

        def __init__(self) -> None:
            self.steps: list[tuple[Any, Any, Any, Any]] = []

        def replay(self) -> None:
            """Run the ops again, on the same memory; views of it still are."""
            replayed[NAME] += 1
            for op, args, kwargs, made in self.steps:
                again = op(*args, **kwargs)
                for old, new in zip(pytree.tree_leaves(made), pytree.tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    class _Recording(TorchDispatchMode):
        def __init__(self, graph: _Graphs.CUDAGraph) -> None:
            super().__init__()
            self.graph = graph

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            self.graph.steps.append((func, args, kwargs or {}, made))
            return made

    def __init__(self) -> None:
        self.users: Mapping[int, WeakSet[_Graphs.CUDAGraph]] = defaultdict(WeakSet)
        self.numbers = count()
        self.newest: int | None = None

    def graph(self, graph: _Graphs.CUDAGraph, pool: int) -> Any:
        """Record what runs inside; a pool goes with the last record in it, as CUDA's do."""
        if pool != self.newest and not self.users[pool]:
            raise RuntimeError(f"pool {pool} is gone")
        self.newest = None
        self.users[pool].add(graph)
        return self._Recording(graph)

    def graph_pool_handle(self) -> int:
        """Return what stands for memory of records."""
        self.newest = next(self.numbers)
        return self.newest


replayed: Counter[str] = Counter()
"""How often records have been replayed."""
RECORD = DeviceType(name=NAME, graphs=cache(_Graphs), count=lambda: 1, chip=lambda _: NAME, memory=_memory, lacks=LACKS)
_kept: list[Any] = []  # what would undo the registration as it goes


_deepcopy_of_torch = torch.Tensor.__deepcopy__


def _deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy without a new storage of torch's, which a device without C++ has no allocator for."""
    if self.device.type != NAME or not self.is_leaf or id(self) in memo:
        copied: Tensor = _deepcopy_of_torch(self, memo)
        return copied
    memo[id(self)] = made = self.detach().clone().requires_grad_(self.requires_grad)
    return made


def _as_of(device: int, x: Tensor) -> Tensor:
    """Return the same memory as a tensor of another device."""
    capsule = torch._C._to_dlpack(x)  # type: ignore[attr-defined]
    record = _capsule_pointer(capsule, b"dltensor")  # a pointer to the data, then the device
    ctypes.c_int32.from_address(record + ctypes.sizeof(ctypes.c_void_p)).value = device
    made: Tensor = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    return made


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op of any kind on host memory; what it makes anew, or gives a view of, is of this kind."""
    calls[op.name()] += 1
    if op in _OTHERWISE:
        return _OTHERWISE[op](*args, **kwargs)
    given = _Given(op)
    results = {argument.name for argument in op._schema.arguments if argument.is_out} & kwargs.keys()
    named = {
        name: pytree.tree_map(given.room_for if name in results else given.on_host, value)
        for name, value in kwargs.items()
    }
    positional = pytree.tree_map(given.on_host, args)
    if results:
        positional = map(_as_op_wants, positional, op._schema.arguments)
    made = op(*positional, **named)
    return pytree.tree_map_only(Tensor, given.back, made)


def _as_op_wants(value: Any, argument: Any) -> Any:
    """Return a tensor of a number where an op with out= has one; other ops are called with numbers."""
    is_number = isinstance(value, (int, float)) and isinstance(argument.type, torch.TensorType)
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None) if is_number else value


class _Given:
    """The tensors of one call, and what stands for them on the host."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.of_memory: dict[int, Tensor] = {}
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}

    def on_host(self, value: Any) -> Any:
        """Return what the host's kernel is given for an argument."""
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        if not isinstance(value, Tensor):
            return value
        if value.device.type != NAME:
            return self._alien(value)
        self.of_memory[value.untyped_storage().data_ptr()] = value
        return self._stands_in(_as_of(_HOST, value), value)

    def room_for(self, result: Tensor) -> Tensor:
        """Return room for a result that can grow, as the host's kernel may make it another size."""
        return self._stands_in(torch.empty(0, dtype=result.dtype), result)

    def _stands_in(self, stand_in: Tensor, value: Tensor) -> Tensor:
        self.stand_ins[id(stand_in)] = stand_in, value
        return stand_in

    def _alien(self, value: Tensor) -> Tensor:
        if value.dim() and self.op not in _MIXES:
            raise RuntimeError(f"{self.op.name()}: all tensors must be on {NAME}, but one is on {value.device}")
        return value

    def back(self, made: Tensor) -> Tensor:
        """Return a result as of this kind: the argument itself, a view of its memory, or new."""
        if id(made) in self.stand_ins:
            return self._argument(*self.stand_ins[id(made)])
        source = self.of_memory.get(made.untyped_storage().data_ptr()) if made.numel() else None
        if source is None or source.dtype != made.dtype:
            return _as_of(_OTHER, made)
        offset = (made.data_ptr() - source.untyped_storage().data_ptr()) // made.itemsize
        return aten.alias(source).as_strided_(made.shape, made.stride(), offset)

    @staticmethod
    def _argument(stand_in: Tensor, value: Tensor) -> Tensor:
        if stand_in.shape != value.shape:
            value.data = _as_of(_OTHER, stand_in)
        elif stand_in.data_ptr() != value.data_ptr():
            _as_of(_HOST, value).copy_(stand_in)
        return value


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    here, there = (_as_of(_HOST, x) if x.device.type == NAME else x for x in (source, target))
    if copied_bytes_per_second is not None:
        time.sleep(source.nbytes / copied_bytes_per_second)
    there.copy_(here)
    return target


def _as_strided(x: Tensor, size: list[int], stride: list[int], offset: int | None = None) -> Tensor:
    """Count from the start of the memory, of which a stand-in on the host has only the tensor's own part."""
    return aten.alias(x).as_strided_(size, stride, x.storage_offset() if offset is None else offset)


def _resize(x: Tensor, size: list[int], *, memory_format: Any = None) -> Tensor:
    needed = torch.Size(size).numel()
    if needed * x.itemsize > x.untyped_storage().nbytes():
        grown = torch.empty(needed, dtype=x.dtype)
        grown[: x.numel()] = _as_of(_HOST, x).reshape(-1)
        x.data = _as_of(_OTHER, grown)
    strides = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format).stride()
    return x.as_strided_(size, strides, x.storage_offset())


def _convolution(*args: Any) -> Any:
    return _run(aten.convolution.default, *args)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    return _run(aten.convolution_backward.default, grad, x, weight, [weight.size(0)], *rest)


# What torch leaves to a device by a name of its own, as no fallback reaches it.
_OVERRIDEABLE: Mapping[str, Callable[..., Any]] = {
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}
_OTHERWISE: Mapping[Any, Callable[..., Any]] = {
    aten._copy_from.default: _copy_from,
    aten.as_strided.default: _as_strided,
    aten.resize_.default: _resize,
}
