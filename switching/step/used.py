"""Which parameters have a gradient of a step: others have none, as on one device, and optimizers pass them over.

A gradient of zeros is another thing: weight decay and momentum change what has one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

from hetu_fx.comm_ops.wire.consensus import any_rank
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.graph.graph import Graph
from hetu_fx.graph.leaves.uses import Use, noting_uses
from hetu_fx.transforms.layouts.flow import gradient_uses, parameters_with_gradient


@dataclass(frozen=True)
class GradientUse:
    """Tells which parameters have a gradient.

    Attributes:
        anywhere: returns which do, by those that this rank has gradients of, and by whether other outputs than the loss
            have had a gradient; collective if ranks may differ.
        noting: entered around each backward.
    """

    anywhere: Callable[[Collection[str], bool], Collection[str]]
    noting: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class GraphUse:
    """Answers for one program: by its graph alone, unless there are leaves in it, which may use other parts each time.

    Attributes:
        graph: the program's.
        all_uses: what leaves in it may make gradients of.
    """

    graph: Graph
    all_uses: tuple[Use, ...] = field(init=False)
    _last: tuple[tuple[frozenset[Use], bool], frozenset[str]] | None = None

    def __post_init__(self) -> None:
        self.all_uses = tuple(gradient_uses(self.graph))

    def used(self, table: GroupTable, *, has_loss: bool) -> GradientUse:
        """Return what answers for one step."""
        notes = set[Use]()

        def anywhere(here: Collection[str], of_outputs: bool) -> frozenset[str]:
            flags = any_rank(table, [use in notes for use in self.all_uses]) if self.all_uses else ()
            notes.clear()
            return self._with_gradient(frozenset(compress(self.all_uses, flags)), of_outputs or not has_loss)

        return GradientUse(anywhere, partial(noting_uses, notes) if self.all_uses else nullcontext)

    def _with_gradient(self, uses: frozenset[Use], of_outputs: bool) -> frozenset[str]:
        key = uses, of_outputs
        if self._last is None or self._last[0] != key:
            self._last = key, parameters_with_gradient(self.graph, uses, of_outputs=of_outputs)
        return self._last[1]
