"""Where rows of several replicas meet: what is gathered there, and what every replica then computes of all rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from hetu_fx.graph.graph import Graph
from hetu_fx.transforms.layouts.axis import AxisDeduction
from hetu_fx.transforms.layouts.states import OperandNeed, Summed, Whole
from hetu_fx.transforms.rewrites.row_ops import PLACE


@dataclass(eq=False)
class RowMeeting:
    """An op that reads rows of all replicas: the values that these sum for it, and what each then computes whole."""

    op: fx.Node
    summed: list[fx.Node] = field(default_factory=list)
    work: list[fx.Node] = field(default_factory=list)


class RowMeetings:
    """Finds where rows meet, from the first op to the last.

    Args:
        graph: a program's.
        batch: how its values lie where rows are spread over replicas.

    Attributes:
        found: the ops that read rows of all replicas, each value being counted for its first reader.
        of: for each value that is whole on every replica as its rows were gathered, the op that they were for.
        placed: values in summands that replicas have placed, and what is linear in them.
        counted: those of `placed` that are work of an op already.
        returned: values whose cotangents are summed for an op already.
    """

    def __init__(self, graph: Graph, batch: AxisDeduction) -> None:
        self.batch = batch
        self.found: list[RowMeeting] = []
        self.of: dict[fx.Node, RowMeeting] = {}
        self.placed: set[fx.Node] = set()
        self.counted: set[fx.Node] = set()
        self.returned: set[fx.Node] = set()
        for node in graph.graph.nodes:
            if node.op == "call_function":
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        needs = self.batch.needs(node)
        fresh = [need.node for need in needs if self._is_gathered(need)]
        if fresh:
            self.found.append(RowMeeting(node, fresh, list(self._linear(fresh))))
            self.of.update(dict.fromkeys(fresh, self.found[-1]))
        meetings = [self.of[source] for source in node.all_input_nodes if source in self.of]
        for need in needs if meetings else ():
            self._return(need)
        if meetings and isinstance(self.batch.states.get(node), Whole):
            self.of[node] = meetings[-1]
            meetings[-1].work.append(node)
        elif node.target is PLACE or self._is_linear(node):
            self.placed.add(node)

    def _is_gathered(self, need: OperandNeed) -> bool:
        return need.node in self.placed and need.node not in self.of and isinstance(need.state, Whole)

    def _is_linear(self, node: fx.Node) -> bool:
        is_summed = isinstance(self.batch.states.get(node), Summed)
        return is_summed and not self.placed.isdisjoint(node.all_input_nodes)

    def _linear(self, values: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Yield what replicas compute of what they have placed until it is summed."""
        waiting = list(values)
        while waiting:
            node = waiting.pop()
            if node in self.placed - self.counted and node.target is not PLACE:
                self.counted.add(node)
                yield node
                waiting.extend(node.all_input_nodes)

    def _return(self, need: OperandNeed) -> None:
        """Count the sum of a cotangent."""
        if self.batch.sums_cotangent(need) and need.node in self.of and need.node not in self.returned:
            self.returned.add(need.node)
            self.of[need.node].summed.append(need.node)
