"""Gradients of one step: collected at the compute parameters, brought home while backward still runs.

Compute parameters are leaves of the step's own graph of autograd (see `frame`). As soon as a leaf's gradient is
complete it is handed to the bridge, whose buckets travel beside the rest of the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from hetu_fx.base.torch_private import accumulates_into_leaves, foreach_mul, gradient_hooks
from hetu_fx.comm_ops.plans.cost import BUCKETS_AT_ONCE
from hetu_fx.comm_ops.wire.consensus import any_rank
from hetu_fx.comm_ops.wire.flat import in_memory
from hetu_fx.errors import StateError
from hetu_fx.switching.bridge.bridge import Bridge, Reduction
from hetu_fx.switching.home.ops import as_home, own_pieces
from hetu_fx.switching.step.execution import StepInputs
from hetu_fx.switching.step.loss import LossGradient
from hetu_fx.switching.step.unit_walk import UnitWalk
from hetu_fx.switching.step.used import GradientUse
from hetu_fx.switching.step.variant import Variant

RunAgain = Callable[[float], None]

ALIKE = 0.5, 2.0
"""What the gradient of a loss may be by that which float16 gradients were made with: a scaler's steps."""


class Collector:
    """Collects one step's gradients.

    Args:
        variant: runs the step; keeps gradients of earlier steps that wait to be synchronised.
        inputs: what the step needs; says whether gradients come home in it, or are kept.
        bridge: brings them home.
        compute: this rank's compute parameters by name.
        loss_gradient: what gradients are to be multiplied by in the end.
        ran_ahead: backward runs in forward, long before the gradient of the loss is known.
        overlaps: gradients may travel beside the backward; not where replicas talk in the middle of the model, whose
            messages must not be interleaved with those of the bridge.
        used: tells which parameters have a gradient; the others get none.
        units: the step's way through units of parameters, where they are gathered unit by unit.

    Attributes:
        run_again: makes all gradients again, in the leaves, by a backward that begins with the gradient of the loss
            that it is given; for a backward that ran ahead in float16. None: they are exact under any scale.
    """

    def __init__(
        self,
        variant: Variant,
        inputs: StepInputs,
        bridge: Bridge,
        compute: Mapping[str, Tensor],
        *,
        loss_gradient: LossGradient,
        ran_ahead: bool,
        overlaps: bool,
        used: GradientUse,
        units: UnitWalk | None = None,
    ) -> None:
        self.bridge, self.homes, self.kept, self.timer = bridge, variant.homes, variant.kept_back, inputs.timer
        self.host = inputs.host
        self.trained = variant.trained
        self._compute, self._copies = variant.compute, compute
        self.leaves = variant.compute.take_leaves(compute, variant.trained)
        trained_here = self.leaves.keys() & variant.trained
        # Whole gradients are not kept back under zero 2 and 3: they add up at home.
        self._syncs, self._trained_here = inputs.syncs_gradients or variant.plan.zero >= 2, trained_here
        # A unit's buckets travel while the one before it is passed; more at once would only hold more whole gradients.
        at_once = BUCKETS_AT_ONCE if units is None else min(BUCKETS_AT_ONCE, bridge.most_of_unit)
        self._most = at_once if variant.plan.lets_gradients_go or units is not None else None
        self._units = units
        self._reduction = self._begun()
        self.ran_ahead, self._loss_gradient, self._overlaps = ran_ahead, loss_gradient, overlaps
        self._used, self._handed_on = used, set[str]()
        self._is_of_outputs = False
        self.run_again: RunAgain | None = None
        self._has_hooks = False
        self.kept.settle()
        self.kept.begun.add(self)
        self._compute.readers.add(self)

    def _begun(self) -> Reduction | None:
        return Reduction(self.bridge, self._trained_here, self._most) if self._syncs else None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Run a backward inside, up to `finish`; if it fails, wait for what is under way, which nobody wants then."""
        with self._walking():
            try:
                yield
            except Exception:
                if self._most is not None and self._reduction is not None:  # buckets of the next step follow others
                    self._loss_gradient.correction()
                    self._reduction.abandon()
                raise

    def _walking(self) -> AbstractContextManager[object]:
        if self._units is None:
            return nullcontext()
        self._check_homes()
        if self._units.is_outdated(own_pieces(self._compute.homes)):
            self.refuse(
                "parameters have been written to between a step's forward and its backward, for which zero 3 gathers "
                "them again\nhint: call backward before optimizer.step(), or use zero 2"
            )
        return self._units.backward(self)

    @property
    def _sums_first(self) -> bool:
        """Whether gradients are summed over ranks before they are multiplied: not with those of earlier steps, which
        have been multiplied."""
        return self._reduction is not None and self.kept.bridge is None

    @property
    def _may_travel(self) -> bool:
        return self._overlaps and self._reduction is not None and (self._sums_first or not self.ran_ahead)

    def noting(self) -> AbstractContextManager[object]:
        """Return what every backward of the step runs in."""
        return self._used.noting()

    def begin(self, nodes: Sequence[Any], *, of_outputs: bool) -> None:
        """Say that backward begins: what the user has cleared of earlier gradients counts no more.

        Gradients that the user takes one by one, by hooks or by torch.autograd.grad, are kept neither back nor beside
        others that were.

        Args:
            nodes: of autograd that take the gradients of the trained parameters, and maybe others.
            of_outputs: other outputs than the loss have gradients.
        """
        self._is_of_outputs = of_outputs
        self.kept.drop_cleared(self.homes)
        keeps = self._reduction is None or self.kept.bridge is not None
        if keeps and not self._adds_up(nodes):
            self.kept.read()
            self._reduction = self._reduction or Reduction(self.bridge, self._trained_here)

    def _adds_up(self, nodes: Sequence[Any]) -> bool:
        """Tell whether nothing happens to gradients but that they are added to those before."""
        hooked = any(any(gradient_hooks(self.homes[name])) for name in self.trained)
        return not hooked and all(accumulates_into_leaves(nodes[: len(self.trained)]))

    def listen(self) -> None:
        """Hand each gradient on as it arrives, from now on, if it may travel: before the backward that completes them.

        The hooks must not own the collector, which owns the leaves: python cannot collect a cycle through a tensor's
        hooks, and every step would leave its parameters behind.
        """
        if not self._may_travel or not self.bridge.sends_gradients or self._units is not None:
            return
        myself = weakref.ref(self)

        def arrived(name: str, leaf: Tensor) -> None:
            collector = myself()
            assert collector is not None, "the boundary keeps the collector until backward has run"
            collector._arrived(name, leaf)

        early = self._trained_here & self.bridge.early
        self._has_hooks = bool(early)
        for name in early:
            self.leaves[name].register_post_accumulate_grad_hook(partial(arrived, name))

    def ran(self) -> None:
        """Hand on all that is left once a backward has run ahead.

        Every rank starts all messages in the same call, as nobody can know whether the loss will be asked for its
        gradient.
        """
        if not self._may_travel:
            return
        assert self._reduction is not None
        left = self._left()
        self._handed_on.update(left)
        if not self._sums_first:
            self._multiply(list(left.values()))
        self._join_kept(left, self.kept.local.keys() & left.keys())
        self._reduction.start(left)
        self.kept.under_way = self._reduction

    def hand_on(self, unit: int, names: Iterable[str]) -> None:
        """Start the gradients of a unit's parameters on their way home."""
        assert self._reduction is not None, "they are not kept back"
        left = _taken({name: self.leaves[name] for name in names if name in self.leaves})
        self._handed_on.update(left)
        self._reduction.start(left, self.bridge.reduced_with[unit])

    def _arrived(self, name: str, leaf: Tensor) -> None:
        assert self._reduction is not None
        self._handed_on.add(name)
        gradient = take_gradient(leaf)
        if gradient is not None and not self._sums_first:
            self._multiply([gradient])
        self._reduction.ready(name, self.kept.take(name, gradient))

    def finish(self, *, goes_on: bool = False) -> dict[str, Tensor]:
        """Return the home gradients, once backward has run; empty if they are kept back.

        Args:
            goes_on: another backward may follow.

        Raises:
            StateError: the parameters have changed their home since the forward.
        """
        self.timer.stop()
        self.kept.begun.discard(self)
        if not goes_on:
            self._compute.readers.discard(self)
        self._check_homes()
        if self._units is not None:
            self._units.end_backward()
        if self.run_again is not None and self._must_run_again():
            for leaf in self.leaves.values():
                leaf.grad = None
            with self.noting():
                self.run_again(self._loss_gradient.ran_again())
        home = self._brought_home(self._left())
        if goes_on:
            self._reduction = self._begun()
            self._handed_on.clear()
        elif not self._has_hooks:
            self._compute.give_back(self.leaves, self._copies, self.trained)
        return home

    def _check_homes(self) -> None:
        if self.bridge.is_outdated:
            self.refuse(
                "the parameters' home has changed between this step's forward and its backward; change it between "
                "steps: after backward, or before the next forward"
            )

    def _left(self) -> dict[str, Tensor]:
        """Take the gradients that have not been handed on out of the leaves."""
        return _taken(self.leaves)

    def _brought_home(self, left: dict[str, Tensor]) -> dict[str, Tensor]:
        """Hand on the gradients that have not been yet, and wait for all; empty if they are kept back."""
        sums_first = self._sums_first
        if not sums_first:
            self._multiply(list(left.values()))
        if self._reduction is None:
            self.kept.add(self.bridge, left, {name: self.homes[name] for name in self._used_by_some(left)})
            return {}
        before = self.kept.shown
        self.kept.withdraw(self.homes)
        used = {*self._handed_on, *left, *self.kept.local}
        self._join_kept(left, list(self.kept.local))
        home = self._reduction.finish(left)
        if sums_first:
            self._multiply(list(home.values()))
        if not home:
            return {}
        names = {*self._used_by_some(used), *before}
        return as_home({name: home[name] for name in self.trained if name in names and name in home}, self.homes)

    def _join_kept(self, left: dict[str, Tensor], names: Iterable[str]) -> None:
        """Put what was kept of some gradients with what is left of them."""
        for name in names:
            joined = self.kept.take(name, left.get(name))
            if joined is not None:
                left[name] = joined

    def _used_by_some(self, here: Collection[str]) -> list[str]:
        """Return what some rank has used, of which this one has used what is `here`; collective if ranks may differ."""
        found = self._used.anywhere(here, self._is_of_outputs)
        return [name for name in self.trained if name in found]

    def _must_run_again(self) -> bool:
        """Tell whether float16 gradients were made under another scale than the loss has, so that some were lost."""
        least, most = ALIKE
        factor = self._loss_gradient.correction()
        if factor == 1.0:
            return False
        found = (leaf.grad for leaf in self.leaves.values() if leaf.grad is not None)
        return not least <= factor <= most or any_rank(self._loss_gradient.table, [not all(map(_is_finite, found))])[0]

    def correction(self) -> float:
        """Return what all that backward makes is to be multiplied by."""
        return self._loss_gradient.correction()

    def refuse(self, why: str) -> NoReturn:
        """Raise a StateError, once what is under way is through, for which the next step would wait in vain."""
        self._loss_gradient.correction()
        if self._reduction is not None and not self.ran_ahead:
            self._reduction.finish()
        raise StateError(why)

    def _multiply(self, gradients: list[Tensor]) -> None:
        """Multiply gradients by what backward ran without of the loss's."""
        factor = self.correction()
        if gradients and factor != 1.0:
            foreach_mul(gradients, factor)


def _taken(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take the gradients out of leaves that have some."""
    taken: dict[str, Tensor] = {}
    for name, leaf in leaves.items():
        if leaf.grad is not None:  # most of another stage's have none
            taken[name], leaf.grad = in_memory(leaf.grad), None
    return taken


def take_gradient(leaf: Tensor) -> Tensor | None:
    """Take its gradient from a leaf, in memory: autograd may leave zeros, or a conjugate, that are not yet there."""
    gradient, leaf.grad = leaf.grad, None
    return None if gradient is None else in_memory(gradient)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
