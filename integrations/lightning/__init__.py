"""Lightning: `Trainer(strategy="hetu_fx")`, or `strategy=HetuStrategy(plan=...)`; imported when it is first named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetu_fx.integrations.lightning.strategy import HetuStrategy as HetuStrategy


def __getattr__(name: str) -> Any:
    if name != "HetuStrategy":
        raise AttributeError(f"module 'hetu_fx.integrations.lightning' has no attribute {name!r}")
    from hetu_fx.integrations.lightning.strategy import HetuStrategy

    return HetuStrategy
