"""Lightning: `Trainer(strategy="hetu_fx")`, or `strategy=HetuStrategy(plan=...)`; imported when it is first named."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetu_fx.integrations.lightning.checkpoints import FolderCheckpoints as FolderCheckpoints
    from hetu_fx.integrations.lightning.strategy import HetuStrategy as HetuStrategy

_HOMES = {"FolderCheckpoints": "checkpoints", "HetuStrategy": "strategy"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hetu_fx.integrations.lightning' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
