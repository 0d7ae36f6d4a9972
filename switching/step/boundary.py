"""Where the user's graph of autograd ends and that of a step begins.

What a step returns depends, for the user's autograd, on the home parameters and on the inputs that need a gradient, by
one node. Its backward goes through the step's own graph, brings the parameters' gradients home, and gives all of them
to the user's autograd. So `torch.autograd.grad`, `backward(inputs=...)`, `retain_graph` and hooks do what they do for a
module on one device, whatever ranks do in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hetu_fx.base.torch_private import ACCUMULATES, are_accumulated, gradient_hooks, keeps_graph, run_backward
from hetu_fx.switching.home.tensor import HomeTensor
from hetu_fx.switching.step.gradients import Collector
from hetu_fx.switching.step.loss import applied

RUNS_ONCE = (
    "a plan with pipeline stages or several micro-batches runs backward inside forward, once, for the loss that the "
    "model returns"
)


@dataclass(frozen=True)
class TiedInput:
    """An input that needs a gradient.

    Attributes:
        outer: as the user has passed it.
        bring_back: takes the gradient of this rank's rows as they ran, makes it that of `outer`; collective.
    """

    outer: Tensor
    bring_back: Callable[[Tensor | None], Tensor]


@dataclass
class StepBackward:
    """The backward of one step on this rank.

    Attributes:
        collector: has the parameters.
        pieces: what the step has made, as parts of its own graph.
        inputs: those that need a gradient.
        leaves: their rows in the step's own graph; a rank without rows has none.
    """

    collector: Collector
    pieces: Sequence[Tensor]
    inputs: Mapping[str, TiedInput] = field(default_factory=dict)
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    is_over: bool = False
    _puts_all: bool = False

    def may_put_all(self, loss: Tensor, node: Any) -> bool:
        """Tell whether all that a backward from the loss does beyond this step is to put gradients where none are.

        Then torch need not go through a node for each parameter, which takes longer than all else of it.

        Args:
            loss: the step's, as it was returned.
            node: of the user's graph, that this step stands behind.
        """
        takers = [taker for taker, _ in node.next_functions]
        if self.inputs or loss.numel() != 1 or set(map(type, takers)) != {ACCUMULATES}:
            return False
        if len(set(map(getrefcount, takers))) > 1:  # somebody else keeps one, as those do that hang hooks on it
            return False
        return all(one.grad is None and not any(gradient_hooks(one)) for one in self._parameters)

    def put_all(self, loss: Tensor, *, keeps_graph: bool) -> None:
        """Run backward from the loss, and put the gradients of all parameters, none of which has one."""
        self._puts_all = True
        try:
            one = torch.ones(loss.shape, dtype=loss.dtype, device=loss.device)
            run_backward([loss], [one], [_WITNESS], keeps_graph=keeps_graph)
        finally:
            self._puts_all = False

    def run(self, gradients: Sequence[Tensor | None], nodes: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the home parameters and of the inputs, from those of the pieces.

        Args:
            gradients: of the pieces.
            nodes: of the user's graph, which take what is returned; the last one is the witness's.
        """
        with self.collector.host.counted():
            return self._run(gradients, nodes)

    def _run(self, gradients: Sequence[Tensor | None], nodes: Sequence[Any]) -> tuple[Tensor | None, ...]:
        self._check(gradients)
        parameters = self._parameters
        accumulated = self._are_accumulated(nodes)
        takers = Takers(parameters, nodes[: len(parameters)], accumulated, are_bare=self._puts_all)
        self.collector.begin(takers.add_up)
        keeps = keeps_graph()
        pairs = [(p, g) for p, g in zip(self.pieces, gradients, strict=True) if g is not None and p.requires_grad]
        if pairs:
            start = self.collector.host.now()
            torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs], retain_graph=keeps)
            self.collector.host.leave_out(start)
        self.is_over = not keeps or self.collector.ran_ahead
        home = self.collector.finish(goes_on=not self.is_over)
        if self.is_over:
            self.pieces = [piece.detach() for piece in self.pieces]
        found = [self._of_input(name, tied) for name, tied in self.inputs.items()]
        left = takers.put(list(map(home.get, self.collector.trained)))
        return (*map(_to_give_away, left), *found)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, in order."""
        return [self.collector.homes[name] for name in self.collector.trained]

    def _are_accumulated(self, nodes: Sequence[Any]) -> Sequence[bool]:
        """Tell for each parameter whether the backward under way adds to its gradient.

        If it goes to the witness, which nobody can ask for, it goes everywhere.
        """
        count = len(self.collector.trained)
        if self._puts_all or all(are_accumulated(nodes[-1:])):
            return [True] * count
        return are_accumulated(nodes[:count])

    def _check(self, gradients: Sequence[Tensor | None]) -> None:
        if torch.is_grad_enabled():
            self.collector.refuse(
                "create_graph=True asks for a second derivative, which a parallel model does not have; compute the "
                'penalty inside the model\'s forward and pass capture="eager" to hetu_fx.auto_parallelize, or take it '
                "inside model.hetu.whole()"
            )
        if self.is_over:
            once = f"{RUNS_ONCE}; " if self.collector.ran_ahead else ""
            self.collector.refuse(
                f"{once}backward goes through this step a second time, but what it needs was freed after the first; "
                f"pass retain_graph=True to the first (under a plan of one stage and one micro-batch)"
            )
        if self.collector.ran_ahead and any(gradient is not None for gradient in gradients[1:]):
            self.collector.refuse(
                f"{RUNS_ONCE}, but a gradient came for another output; compute the whole loss in the model, or pass "
                f"loss_fn=... to hetu_fx.auto_parallelize"
            )

    def _of_input(self, name: str, tied: TiedInput) -> Tensor:
        leaf = self.leaves.get(name)
        if leaf is None:
            return tied.bring_back(None)
        gradient, leaf.grad = leaf.grad, None
        gradient = torch.zeros_like(leaf) if gradient is None else gradient * self.collector.correction()
        return tied.bring_back(gradient)


@dataclass(frozen=True)
class Takers:
    """What takes the gradients of parameters: by node of the user's graph, and whether it adds to those before.

    `are_bare` says that no parameter has a hook, as has been looked up.
    """

    parameters: Sequence[nn.Parameter]
    nodes: Sequence[Any]
    accumulated: Sequence[bool]
    are_bare: bool

    def add_up(self) -> bool:
        """Tell whether nothing happens to gradients but that they are added to those before."""
        return not any(any(gradient_hooks(one)) for one in self.parameters) and all(self.accumulated)

    def put(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Put parameters' first gradients where autograd would; return what is left for autograd to do.

        It would make an alias of each first, which takes a home tensor as long as all else that is done for it.
        """
        each = zip(self.parameters, self.nodes, self.accumulated, strict=True)
        for number, (parameter, node, is_added) in enumerate(each):
            if is_added and type(node) is ACCUMULATES and gradients[number] is not None:
                if parameter.grad is None and (self.are_bare or not any(gradient_hooks(parameter))):
                    parameter.grad, gradients[number] = gradients[number], None
        return gradients


def _to_give_away(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient that autograd may keep: what others have too it would copy, which counts as a write.

    Empty ones are kept for the next step (`home.wrapped`).
    """
    is_kept = isinstance(gradient, HomeTensor) and not gradient.local.numel()
    return gradient.detach() if gradient is not None and is_kept else gradient


_WITNESS = torch.zeros((), device="cpu", requires_grad=True)
"""A leaf behind every step, beside the parameters. It gets no gradient."""

_KEPT = get_gradient_edge(_WITNESS).node
"""Its node, kept as often as those of parameters are, by `home.outside`."""


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: StepBackward, *tied: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        return tuple(piece.detach() for piece in step.pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.step.run(gradients, [node for node, _ in ctx.next_functions]), None)


def tied(step: StepBackward) -> list[Tensor]:
    """Return the pieces of a step as parts of the user's graph, the loss first if there is one."""
    homes = [step.collector.homes[name] for name in step.collector.trained]
    made: Sequence[Tensor] = applied(_Boundary, step, *homes, *(one.outer for one in step.inputs.values()), _WITNESS)
    return list(made)
