"""The visible list of graph passes, in the order in which they run on a captured graph."""

from __future__ import annotations

from hetu_fx.transforms.batch_statistics import BatchStatistics
from hetu_fx.transforms.global_mean import GlobalMean
from hetu_fx.transforms.pass_ import GraphPass
from hetu_fx.transforms.randomness import Randomness

GRAPH_PASSES: tuple[GraphPass, ...] = (GlobalMean(), BatchStatistics(), Randomness())
