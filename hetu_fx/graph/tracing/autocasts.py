"""torch.autocast as it is around a call, and as it is to be around another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hetu_fx.base.device_types import HOST, device_types

Autocasts = tuple[tuple[str, torch.dtype], ...]
"""The kinds of devices for which torch.autocast is on, and what it casts to."""


def ambient_autocasts() -> Autocasts:
    """Return the kinds of devices for which torch.autocast is on, and the dtype that it casts to."""
    kinds = [kind.name for kind in device_types() if torch.is_autocast_enabled(kind.name)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


@contextlib.contextmanager
def casting(autocasts: Autocasts) -> Iterator[None]:
    """Let these autocasts be on inside, and no others."""
    with contextlib.ExitStack() as stack:
        for kind, _ in ambient_autocasts():
            stack.enter_context(torch.autocast(kind, enabled=False))
        for kind, dtype in autocasts:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        yield


@contextlib.contextmanager
def casting_on_host(device: torch.device) -> Iterator[None]:
    """Let the autocast that is on for a device's type be on for the host inside, and no other."""
    with casting(tuple((HOST.type, dtype) for kind, dtype in ambient_autocasts() if kind == device.type)):
        yield
