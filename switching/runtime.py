"""The one owner of live state: groups, home parameters, variants, and what runs now.

A step: facts of all ranks are agreed on, a variant is chosen, rows move to its pipelines, parameters are gathered,
the stage runs, and one loss comes out on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.base.torch_private import transform_level
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.calls import note
from hetu_fx.comm_ops.wire.consensus import Count, StepFacts, broadcast_from_rank0
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.errors import CommError, StateError
from hetu_fx.graph.bind import LossCall, as_call
from hetu_fx.plans.homes import choose_homes, home_weights
from hetu_fx.plans.plan import Plan
from hetu_fx.program.batch import batch_from_call
from hetu_fx.switching.agreement import Agreement, Watcher
from hetu_fx.switching.eviction import IdleMemory
from hetu_fx.switching.home.layout import HomeLayout, home_layout
from hetu_fx.switching.home.parameters import Buffers, bring_home
from hetu_fx.switching.home.shared import SharedHomes
from hetu_fx.switching.home.writes import Writes
from hetu_fx.switching.members import MemberWatch
from hetu_fx.switching.migrate.in_flight import InFlightState
from hetu_fx.switching.migrate.migrate import migrate
from hetu_fx.switching.migrate.move_plan import SwitchPlan
from hetu_fx.switching.settings import Settings
from hetu_fx.switching.step.execution import (
    Division,
    Execution,
    LossAndOutput,
    Reading,
    StepInputs,
    VariantPart,
    check_takes_any_row,
)
from hetu_fx.switching.step.loss import PredictedLossGrad, SeenLoss
from hetu_fx.switching.step.policy import BatchFacts
from hetu_fx.switching.step.rows import RowPlan, check_rows, plan_rows
from hetu_fx.switching.step.step_report import LastStep, StepTimes
from hetu_fx.switching.step.timer import ComputeTimer, HostTime, find_clock
from hetu_fx.switching.step.variant import Variant
from hetu_fx.switching.variants import Variants
from hetu_fx.switching.whole import WholeModule

_log = logging.getLogger("hetu_fx.variants")
_CALLS_BITS = 20  # of a draw: they number the calls between two steps


Optimizers = Sequence[torch.optim.Optimizer]
Listener = Callable[[str, float, float], None]


class Runtime:
    """Runs batches on the current variant, and changes it between steps."""

    def __init__(
        self,
        model: nn.Module,
        table: GroupTable,
        execution: Execution[Any],
        homes: Mapping[str, nn.Parameter],
        settings: Settings,
    ) -> None:
        self.model, self.table, self.execution, self.homes = model, table, execution, homes
        self.settings = settings
        self.members = MemberWatch(model, homes)
        self.buffers = Buffers(model, table)
        self.shared = SharedHomes(table, homes, settings.options.patience_seconds)
        self.variants = Variants(execution, table, homes)
        self.current = ""
        self._syncs_gradients = True
        self.step = 0
        self._untrained = 0  # calls since the last step
        self.guess = PredictedLossGrad()
        self.report = LastStep()
        self.switches = 0
        self.times = StepTimes()
        self.idle = IdleMemory(table, settings.options.idle_bytes)
        self.writes = Writes(table, homes, self.buffers)
        self.agreement = Agreement(
            model, table, execution, settings, self.writes, self.members, own_seconds=self._own_seconds
        )
        self.whole = WholeModule(model, table, self.buffers, self.writes, settings.options.idle_bytes)
        self.in_flight = InFlightState(table, lambda: self.step)
        self._listeners: dict[object, Listener] = {}
        self._lost_listeners: list[Callable[[CommError], None]] = []
        self._stand_by: Callable[[], None] = _rest
        self._groups_seen = len(table.creations)
        self._last_rows: tuple[Plan, tuple[int, ...], RowPlan] | None = None
        self.clock = find_clock(next(model.parameters()).device)
        self.host = HostTime(lambda: table.waited_seconds)
        self.prepared_seconds: dict[str, float] = {}  # by what was done before the first step

    def note_prepared(self, seconds: Mapping[str, float]) -> None:
        """Take note of what was done before what is known so far, and how long it took."""
        self.prepared_seconds = {**seconds, **self.prepared_seconds}

    def listen_to_losses(self, listener: Callable[[CommError], None]) -> None:
        """Call a listener with the error of a step in which a rank is lost, until `stop_listening`."""
        self._lost_listeners.append(listener)

    def stop_listening(self, listener: Callable[[CommError], None]) -> None:
        """Call it no more."""
        self._lost_listeners.remove(listener)

    def add_variant(
        self, plan: Plan, name: str, planned_rates: Mapping[int, float] | None = None, deduced: bytes | None = None
    ) -> Variant:
        """Add a variant, as `Variants.add` does; the first one is the current one."""
        variant = self.variants.add(plan, name, planned_rates, deduced)
        self.current = self.current or name
        return variant

    def watch(self, *watchers: Watcher) -> None:
        """Let watchers go along from the next step on, after those that do so already."""
        self.agreement.watchers += watchers

    def unwatch(self, watcher: Watcher) -> bool:
        """Let a watcher go along no more; tell whether it did."""
        watchers = self.agreement.watchers
        found = watcher in watchers
        watchers[:] = [other for other in watchers if other is not watcher]
        return found

    def when_idle(self, act: Callable[[], None]) -> None:
        """Do this on a rank without work while the others compute."""
        self._stand_by = act

    def listen_to_communication(self, listener: Listener | None, whose: object = None) -> None:
        """Call `listener(what, start, end)` after each communication of this rank; None: no more, of this owner."""
        self._listeners.pop(whose, None)
        if listener is not None:
            self._listeners[whose] = listener
        told = tuple(self._listeners.values())

        def tell_all(what: str, start: float, end: float) -> None:
            for one in told:
                one(what, start, end)

        self.table.listener = tell_all if told else None

    def resume(self, step: int, guess: float | None = None) -> None:
        """Go on after so many training steps, and with that for the gradient of the loss, if it is known."""
        self.step = step
        self.guess.value = self.guess.value if guess is None else guess

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication until the first backward outside, or until one is read.

        Reading one (a norm, an optimizer's step, `to_local`) brings all home, as if they had never been kept. Under
        zero 2 and 3 gradients add up at home instead, as no rank has room for whole ones: each backward communicates.
        """
        before, self._syncs_gradients = self._syncs_gradients, False
        try:
            yield
        finally:
            self._syncs_gradients = before

    def switch_home(
        self, annotations: Mapping[str, Annotation], optimizers: Optimizers, overlap: bool | None = None, why: str = ""
    ) -> SwitchPlan:
        """Bring parameters and all that belongs to them to other homes, between steps; collective.

        Gradients that were kept back come home first. `overlap` (see `migrate`) leaves what optimizers keep for later.
        `why` is for the record, where the user has not asked for the change.
        """
        self.in_flight.settle()
        start = perf_counter()
        with using(self.table):
            self.variants[self.current].flush()
            for variant in self.variants.values():
                variant.compute.rehome()
            plan = migrate(self.homes, annotations, optimizers, self.table, later=self.in_flight, overlap=overlap)
        self.in_flight.record_home_change(plan, perf_counter() - start, why)
        return plan

    @property
    def awaits_backward(self) -> bool:
        """Tell whether this rank holds a step of training whose backward may come yet: homes must stay until then."""
        return any(variant.kept_back.awaits_backward for variant in self.variants.values())

    def charge_groups(self, variant: Variant | None = None) -> None:
        """Count the groups that have been created since the last call as a variant's, None: as the current one's."""
        found = self.table.creations[self._groups_seen :]
        self._groups_seen += len(found)
        (variant or self.variants[self.current]).first_use.groups += found

    def warm(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make every usable variant ready for such a batch, and run it without a trace where it takes it; collective.

        Variants stay within the bound of those that do not run: what is too much is evicted again.
        """
        with using(self.table):
            batch, facts = self._agree(args, kwargs)
            self.charge_groups()
            for number, (name, variant) in enumerate(self.variants.usable.items(), 1):
                _log.info("variant %d of %d, %r, is made ready", number, len(self.variants.usable), name)
                with self.idle.use(variant, self.step):
                    self._warm(variant, batch, facts)
                self.charge_groups(variant)
                self._settle()

    def _warm(self, variant: Variant, batch: Reading[Any], facts: StepFacts) -> None:
        inputs = self._inputs(facts.counts, self._rows(variant, facts), ComputeTimer(self.clock, self.host))
        inputs = replace(inputs, stand_by=_rest, tell=_say_nothing)
        batch.build(variant, inputs)
        if variant.facts.fits(_batch_facts(facts)):
            with torch.set_grad_enabled(self.model.training):
                batch.rehearse(variant, inputs)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one batch; collective, unless the model is the plain module now."""
        if self.whole.is_open:
            return self.execution.forward(*args, **kwargs)
        if transform_level() is not None:
            raise StateError(
                "a parallel model cannot run inside a transform of torch.func (grad, vmap, ...), which has no part "
                "in what ranks send\nhint: call the transform inside `with model.hetu.whole():`, or backward() outside"
            )
        note("model(...)", is_step=True)
        self.times.begin(perf_counter())
        self.report.host_seconds, self.host.seconds = self.host.seconds, 0.0
        try:
            with using(self.table), self.host.counted():
                return self._run_together(args, kwargs)
        except CommError as error:
            for listener in tuple(self._lost_listeners):
                listener(error)
            raise

    def _run_together(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        batch, facts = self._agree(args, kwargs)
        if facts.is_asked_alone:
            return self._run_alone(args, kwargs)
        self.shared.forget()
        for watcher in tuple(self.agreement.watchers):
            watcher.observe(facts)
        division = batch.divide(self.variants.able(), self.variants.health.rates)
        return self._run(division or self._by_rows(batch, facts))

    def _run_alone(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a batch without gradients on this rank, as the plain module; the others wait, and will find it later."""
        _log.info("rank %d calls the model alone: it runs whole here", self.table.rank)
        forward, loss_fn = self.execution.forward, self.execution.loss_fn
        call = LossCall(forward, loss_fn)
        batch = batch_from_call(call.signature, args, kwargs)
        given, named = as_call(batch)
        with self.whole.opened(alone=True):
            output = forward(*given, **call.of_model(named))
            if loss_fn is None or call.missing(batch):
                return output
            return LossAndOutput(loss_fn(output, *given, **call.of_loss(named)), output)

    def _by_rows(self, batch: Reading[Any], facts: StepFacts) -> Division[Any]:
        """Return a batch of rows as one part, of the variant that is chosen for it."""
        name = self.variants.chosen(_batch_facts(facts))
        variant = self.variants[name]
        check_takes_any_row(variant.plan, facts.longest)
        return Division((VariantPart(name, self._rows(variant, facts), batch.run),), facts.counts)

    def _become(self, name: str) -> None:
        """Change the variant inside a step: gradients that it keeps back stay with it."""
        if name == self.current:
            return
        self.buffers.sync()
        self.charge_groups()
        self.current = name
        self.switches += 1

    def _settle(self) -> None:
        """Hold what does not run to its bound; collective."""
        self.idle.settle(self.variants, self.current, self.step)

    def _agree(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Reading[Any], StepFacts]:
        """Return a batch that all ranks have agreed on, once the model's new members are at home; collective."""
        batch, facts, changed = self.agreement.read(args, kwargs)
        if changed:
            self._take_in()
        return batch, facts

    def _own_seconds(self) -> Mapping[str, float]:
        """Return what the last step took here; 0, for unknown, where only this host would wait to know it."""
        timer = self.report.timer
        compute_seconds = timer.seconds / timer.share if self.table.size > 1 or timer.is_known else 0.0
        return {"compute_seconds": compute_seconds, "host_seconds": self.report.host_seconds}

    def _take_in(self) -> None:
        """Take in what the script has made of the model's parameters and buffers; collective."""
        self.in_flight.settle()
        for variant in self.variants.values():
            variant.flush()
        strangers = self.members.strangers
        if strangers and self.table.size > 1:
            bring_home(self.model, strangers, self._layouts(strangers), self.table)
        self.buffers.take_from_first(self.members.new_buffers)
        are_others = self.members.has_other_parameters
        self.members.settle()
        self.writes.begin()
        self.shared.know(self.homes)
        self.variants.take_in_homes(are_others=are_others)

    def _layouts(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, HomeLayout]:
        """Return where new parameters are at home, by the rule for those of the start: near the plan that runs.

        Collective: what a plan reads is found out by one rank for all, whose examples have other sizes.
        """
        plan, table = self.variants[self.current].plan, self.table
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        read = broadcast_from_rank0(table, lambda: self.execution.compute_annotations(plan))
        topology = table.topology
        weights = home_weights(plan, topology if isinstance(topology, Cluster) else None, table.size)
        able = [0.0 if rank in self.variants.drained else weight for rank, weight in enumerate(weights)]
        annotations = choose_homes(plan, read, shapes, able)
        return {name: home_layout(annotations[name], shape, table.rank, table.size) for name, shape in shapes.items()}

    def _run(self, division: Division[Any]) -> Any:
        """Run the parts of a batch one after another, as one step; home parameters stay where they are."""
        first, *_ = division.parts
        for name, variant in self.variants.items():
            if name != first.variant:
                variant.flush()
        self._become(first.variant)
        self._settle()
        self.step += self._trains
        self._untrained = 0 if self._trains else self._untrained + 1
        if self._trains:
            self.whole.drop()
        made, timer, built = [], ComputeTimer(self.clock, self.host), self.idle.events.count
        for part in division.parts:
            self._become(part.variant)
            inputs = self._inputs(division.counts, part.rows, timer)
            if division.planned is not None:
                inputs = replace(inputs, outputs="loss", stand_by=_rest)
            with self.idle.use(self.variants[part.variant], self.step) as variant:
                made.append(part.run(variant, inputs))
            rows = tuple(map(len, part.rows.pipelines))
            self.report = LastStep(self.current, rows, timer, division.planned, division.work)
        if self._trains and division.planned is None:
            self.times.train(self.current, self.switches, builds=self.idle.events.count > built)
        joined = division.joined(made)
        self.report.loss = SeenLoss(joined.loss)
        return joined.output if self.execution.loss_fn is None or joined.loss is None else joined

    @property
    def _trains(self) -> bool:
        return self.model.training and torch.is_grad_enabled()

    def _inputs(self, counts: tuple[Count, ...], rows: RowPlan, timer: ComputeTimer) -> StepInputs:
        return StepInputs(
            counts=counts,
            rows=rows,
            step=self.step,
            buffers=self.buffers,
            seed=self.settings.seed or 0,
            draw=-(self.step << _CALLS_BITS | self._untrained) if self._untrained else self.step,
            shared=self.settings.shared,
            outputs=self.settings.outputs,
            syncs_gradients=self._syncs_gradients or self.table.size == 1,
            guess=self.guess,
            timer=timer,
            host=self.host,
            stand_by=self._stand_by,
            tell=self.execution.observers.tell,
        )

    def _rows(self, variant: Variant, facts: StepFacts) -> RowPlan:
        check_rows(facts.rows, shared=self.settings.shared)
        plan, last = variant.plan, self._last_rows
        if last is None or last[0] is not plan or last[1] != facts.rows:
            rows = plan_rows(plan, facts.rows, shared=self.settings.shared, repeats=variant.repeats_rows)
            self._last_rows = last = plan, facts.rows, rows
        return last[2]


def _say_nothing(found: Mapping[str, Any]) -> None:
    """Tell nobody what observed submodules have made."""


def _rest() -> None:
    """Do nothing while others compute."""


def _batch_facts(facts: StepFacts) -> BatchFacts:
    return BatchFacts(facts.longest, sum(facts.rows))
