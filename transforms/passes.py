"""The visible list of graph passes, in the order in which they run on a captured graph."""

from __future__ import annotations

from hetu_fx.transforms.global_mean import GlobalMean
from hetu_fx.transforms.pass_ import GraphPass

GRAPH_PASSES: tuple[GraphPass, ...] = (GlobalMean(),)
