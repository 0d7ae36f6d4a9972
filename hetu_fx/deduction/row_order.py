"""Where rows may be permuted inside a shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from hetu_fx.deduction.call import Call
from hetu_fx.deduction.rule import Factoring


@dataclass(frozen=True, slots=True)
class Routing:
    calls: Mapping[fx.Node, Call]
    shard_ordered: frozenset[fx.Node]


def find_routing(graph: fx.Graph, steps: Mapping[fx.Node, tuple[Call, Factoring]]) -> Routing:
    return Routing({}, frozenset())
