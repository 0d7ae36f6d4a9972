"""The name "hetu_fx" among Lightning's strategies; imported right after these are, it loads nothing else of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from hetu_fx.integrations.lightning.strategy import HetuStrategy


def _make_strategy(**options: Any) -> HetuStrategy:
    """Return the strategy, when a Trainer is made with its name."""
    from hetu_fx.integrations.lightning.strategy import HetuStrategy

    return HetuStrategy(**options)


StrategyRegistry.register("hetu_fx", _make_strategy, description="parallel by hetu_fx, under the plan that it makes")
