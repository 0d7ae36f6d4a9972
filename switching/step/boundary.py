"""Where the user's graph of autograd ends and that of a step begins.

What a step returns depends, for the user's autograd, on the home parameters and on the inputs that need a gradient, by
one node. Its backward goes through the step's own graph, brings the parameters' gradients home, and gives all of them
to the user's autograd. So `torch.autograd.grad`, `backward(inputs=...)`, `retain_graph` and hooks do what they do for a
module on one device, whatever ranks do in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hetu_fx.base.torch_private import accumulates_into_leaves, gradient_hooks, keeps_graph
from hetu_fx.switching.step.gradients import Collector, take_gradient
from hetu_fx.switching.step.loss import apply_outside_transforms

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

    def run(self, gradients: Sequence[Tensor | None], nodes: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the home parameters and of the inputs, from those of the pieces.

        Args:
            gradients: of the pieces.
            nodes: of the user's graph, which take what is returned.
        """
        with self.collector.host.counted():
            self._check(gradients)
            with self.collector.passing():
                return self._run(gradients, nodes)

    def _run(self, gradients: Sequence[Tensor | None], nodes: Sequence[Any]) -> tuple[Tensor | None, ...]:
        of_outputs = any(gradient is not None for gradient in gradients[1:])
        self.collector.begin(nodes, of_outputs=of_outputs)
        if of_outputs:
            gradients = self._scaled(gradients)
        keeps = keeps_graph()
        pairs = [(p, g) for p, g in zip(self.pieces, gradients, strict=True) if g is not None and p.requires_grad]
        if pairs:
            start = self.collector.host.now()
            with self.collector.noting():
                torch.autograd.backward([p for p, _ in pairs], [g for _, g in pairs], retain_graph=keeps)
            self.collector.host.exclude_since(start)
        self.is_over = not keeps or self.collector.ran_ahead
        home = self.collector.finish(goes_on=not self.is_over)
        if self.is_over:
            self.pieces = [piece.detach() for piece in self.pieces]
        found = [self._of_input(name, tied) for name, tied in self.inputs.items()]
        parameters = [self.collector.homes[name] for name in self.collector.trained]
        left = _put(parameters, list(map(home.get, self.collector.trained)), nodes[: len(parameters)])
        return (*left, *found)

    def _scaled(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return gradients of which those of outputs are right once all are multiplied by what the loss's lacks."""
        factor = self.collector.correction()
        if factor == 1.0:
            return gradients
        if factor == 0.0:
            self.collector.refuse(
                "the gradient of the loss is 0 on the average of all ranks, while other outputs have gradients\nhint: "
                'ask for these outputs by hetu_fx.auto_parallelize(..., outputs="all"), or leave the loss out'
            )
        loss, *others = gradients
        return [loss, *(None if gradient is None else gradient / factor for gradient in others)]

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
                f"{once}backward goes through this step a second time, but what it needs was freed after the first\n"
                f"hint: pass retain_graph=True to the first (under a plan of one stage and one micro-batch)"
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
        gradient = take_gradient(leaf)
        gradient = torch.zeros_like(leaf) if gradient is None else gradient * self.collector.correction()
        return tied.bring_back(gradient)


def _put(
    parameters: Sequence[nn.Parameter], gradients: list[Tensor | None], nodes: Sequence[Any]
) -> list[Tensor | None]:
    """Put parameters' first gradients where autograd would by `nodes`; return what is left for autograd to do.

    It would make an alias of each first, which takes a home tensor as long as all else that is done for it.
    """
    hooks, accumulated = map(gradient_hooks, parameters), accumulates_into_leaves(nodes)
    for number, (parameter, hooked, is_added) in enumerate(zip(parameters, hooks, accumulated, strict=True)):
        if is_added and gradients[number] is not None and not any(hooked) and parameter.is_leaf:
            if parameter.grad is None:
                parameter.grad, gradients[number] = gradients[number], None
    return gradients


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: StepBackward, *tied: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        return tuple(piece.detach() for piece in step.pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, *ctx.step.run(gradients, [node for node, _ in ctx.next_functions]))


def tie_to_user_graph(step: StepBackward) -> list[Tensor]:
    """Return the pieces of a step as parts of the user's graph, the loss first if there is one."""
    homes = [step.collector.homes[name] for name in step.collector.trained]
    made: Sequence[Tensor] = apply_outside_transforms(
        _Boundary, step, *homes, *(one.outer for one in step.inputs.values())
    )
    return list(made)
