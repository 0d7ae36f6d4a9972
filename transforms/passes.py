"""The visible list of graph passes, in the order in which they run on a captured graph."""

from __future__ import annotations

from hetu_fx.transforms.pass_ import GraphPass
from hetu_fx.transforms.rewrites.batch_norm import BatchStatistics
from hetu_fx.transforms.rewrites.counter_rng import Randomness
from hetu_fx.transforms.rewrites.global_mean import GlobalMean

GRAPH_PASSES: tuple[GraphPass, ...] = (GlobalMean(), BatchStatistics(), Randomness())
