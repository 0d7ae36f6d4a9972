"""Tries plans of one model: makes a case that is small enough, keeps what was found, and says what was not checked."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetu_fx.base.device_types import HOST
from hetu_fx.base.progress import Tell, telling
from hetu_fx.base.words import bytes_text
from hetu_fx.check.kept import Answer, KeptAnswers, default_folder, question_key
from hetu_fx.check.model import ModelTemplate, Narrowing
from hetu_fx.check.small_batch import (
    TrialSizes,
    cut_batch,
    cut_rows,
    fewest_rows,
    rows_of_ranks,
    sequence_length_for,
    uneven_row_count,
    with_few_micro_batches,
    with_few_pipelines,
)
from hetu_fx.check.trial import Case, Found, TrialReference, alone, loss_is_additive, run_trial
from hetu_fx.check.trial_blocks import KeptBlocks, recast_program, same_ops
from hetu_fx.check.trial_report import differences_text, failure_text
from hetu_fx.cluster.host import memory_left
from hetu_fx.deduction.rules.registry import registered_rules
from hetu_fx.errors import CheckError, HetuFxError
from hetu_fx.graph import meta
from hetu_fx.graph.bind import Batch, as_call, flatten_batch
from hetu_fx.graph.row_dims import count_rows
from hetu_fx.graph.tracing.autocasts import casting
from hetu_fx.plans.plan import Plan
from hetu_fx.program.batch import batch_from_call
from hetu_fx.program.program import Program
from hetu_fx.switching.adapt.tried import TrialResult
from hetu_fx.switching.eager.execution import EagerExecution
from hetu_fx.switching.eager.row_mode import BY_ROWS, NOT_KNOWN, RowMode
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.step.execution import Execution

_log = logging.getLogger("hetu_fx.check")

SECONDS = 10.0
"""That a trial may take, if nobody says otherwise."""

SHARE_OF_MEMORY = 0.25
"""Of what the host has left, which a trial may take."""

MANY_RANKS = 8
"""Ranks of plans above which of pipelines that are alike two are tried."""

_DRAWS = "it draws random numbers, which would differ on each replica (check=False says that they may)"
_SUMS = 1e-5  # that the losses of parts of a batch may add up to besides that of the batch: some are of float32
_BYTES = 8  # of a number
_COPIES = 4  # of all parameters: one device's, its gradients, the ranks' homes, and what is on its way
_COPIES_OF_REPLICA = 3  # what a pipeline computes with, its gradients, and those on their way home
_SECONDS_OF_OP = 0.004  # of a rank's graph: to make it, and to run it forward and backward


class NotChecked(Exception):
    """A trial cannot be; says why."""


@dataclass(frozen=True)
class Cut:
    """How much of a model a case leaves out."""

    blocks: bool
    tables: bool
    lengths: bool
    dtype: torch.dtype = torch.float64


_CUTS = (
    Cut(blocks=True, tables=True, lengths=True),
    Cut(blocks=True, tables=False, lengths=True),
    Cut(blocks=True, tables=False, lengths=False),
    Cut(blocks=False, tables=False, lengths=False),
    Cut(blocks=True, tables=False, lengths=False, dtype=torch.float32),
    Cut(blocks=False, tables=False, lengths=False, dtype=torch.float32),
)


@dataclass(frozen=True, eq=False)
class Ready:
    """A case, what one device makes of it, its graph, and which blocks it has."""

    case: Case
    reference: TrialReference
    captured: GraphExecution | None
    blocks: KeptBlocks


class Checker:
    """Tries plans of one model.

    Args:
        model: the user's, whose parameters have values here.
        loss_fn: what makes the loss, if the model does not.
        batch: an example.
        execution: how the model runs.
        world: the number of ranks of the job.
        shared: all ranks pass the same batch.
        folder: where answers are kept; None: the user's.
        seconds: that a trial may take.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        batch: Batch,
        execution: Execution[Any],
        *,
        world: int,
        shared: bool,
        folder: Path | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self.world, self.shared, self.seconds = world, shared, seconds
        self.answers = KeptAnswers(folder or default_folder())
        self.problem, self.template = "", None
        self.program: Program | None = None
        args, kwargs = as_call(batch)
        if isinstance(execution, EagerExecution):
            self.problem = _problem_of(execution)
            self.batch = batch_from_call(execution.module.signature, args, kwargs)
            self.row_dims = execution.read(args, kwargs, True, shared=shared).batch.row_dims
        else:
            assert isinstance(execution, GraphExecution), "there are two ways of running a model"
            self.program = execution.program
            self.batch = execution.programs.batch(args, kwargs)
            self.row_dims = self.program.row_dims
        try:
            self.template = None if self.problem else ModelTemplate.of(model, loss_fn)
        except HetuFxError as error:
            self.problem = str(error)

    def try_plan(self, plan: Plan) -> TrialResult:
        """Try a plan, unless that has been done; return what was found.

        Raises:
            CheckError: it does not give what one device gives.
        """
        if self.program is None:  # nothing tells a module from one with other code, and no capture is needed
            return self._tried(plan)[0]
        key = self._key(plan, self.program)
        known = self.answers.get(key)
        if known is None:
            tried, was_checked = self._tried(plan)
            known = Answer(key, was_checked, tried.says)
            self.answers.put(known)
        return TrialResult(known.says)

    def _tried(self, plan: Plan) -> tuple[TrialResult, bool]:
        """Return what was found, and whether the plan was checked."""
        start, was_checked = time.monotonic(), False
        with telling("trying the plan") as tell, _surroundings():
            try:
                tried = self._found(plan, start, tell)
                was_checked = True
            except NotChecked as why:
                unknown = f"it is unknown whether it works row by row: {why} (check=False says that it does)"
                tried = TrialResult(f"not checked: {why}", RowMode(False, why=unknown))
        _log.log(logging.INFO if was_checked else logging.WARNING, "plan %s: %s", plan.summary(), tried.says)
        return tried, was_checked

    def _key(self, plan: Plan, program: Program) -> str:
        asked = replace(plan, name=None, predicted=None, max_length=None).to_json()
        how = f"{self.world} {self.shared} {self.seconds} {self.problem}"
        return question_key([_text(program), str(asked), how, str(self.batch_form), *registered_rules()])

    @property
    def batch_form(self) -> object:
        """Return the sizes and dtypes of the example."""
        return {name: (tuple(x.shape), str(x.dtype)) for name, x in flatten_batch(self.batch)[1].items()}

    def _found(self, plan: Plan, start: float, tell: Tell) -> TrialResult:
        """Make a case and try it; of a module that runs as it is by rows first, then with all rows on each replica.

        Raises:
            CheckError: what differs, and the case.
            NotChecked: it cannot be tried.
        """
        tell("making it small", 0, 3)
        if (known := self._found_by_recasting(plan, start)) is not None:
            return TrialResult(self._says(*known, start), NOT_KNOWN)
        ready = self._ready(plan, start)
        tell("as all ranks", 1, 3)
        found: Found | None = None
        mode = ready.case.eager
        if mode is not None and mode.by_rows:
            found = self._by_rows(ready, start)
            if not found.is_right:
                mode = RowMode(False, adds_up=mode.adds_up, why=f"by rows it would be wrong: {differences_text(found)}")
                found, ready = None, replace(ready, case=replace(ready.case, eager=mode))
        found = found or self._checked(plan, ready, start, tell)
        return TrialResult(self._says(found, ready, start), mode or NOT_KNOWN)

    def _found_by_recasting(self, plan: Plan, start: float) -> tuple[Found, Ready] | None:
        """Return that a case is right whose program is made of the model's; None: only a capture of the case tells."""
        if self.program is None or self.template is None:
            return None
        try:
            ready = self._case(plan, _CUTS[0], recasts=self.program)
            found = self._compared(ready, start)
            if found.is_right:
                return found, ready
            _log.debug("captured again, as recast it differs: %s", differences_text(found))
        except Exception as error:  # not each graph can be recast, nor each model runs as small
            _log.debug("captured again, as it cannot be recast: %s", error)
        return None

    def _by_rows(self, ready: Ready, start: float) -> Found:
        """Return what replicas make of a case that each run their own rows."""
        try:
            return self._compared(ready, start)
        except NotChecked:
            raise
        except Exception as error:  # a module may refuse some rows, or take another number of them for granted
            return Found(failure=f"{type(error).__name__}: {error}")

    def _checked(self, plan: Plan, ready: Ready, start: float, tell: Tell) -> Found:
        """Return what one step as all ranks gives, where that is what one device gives; raises as `_found` does."""
        cause: Exception | None = None
        try:
            found = self._compared(ready, start)
        except NotChecked:  # there is no time left
            raise
        except HetuFxError as error:
            raise NotChecked(f"the small case is refused: {error}") from error
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise NotChecked(f"there is not enough memory: {error}") from error
        except Exception as error:  # one device has gone through the same step
            found, cause = Found(failure=f"{type(error).__name__}: {error}"), error
        if not found.is_right:
            tell("looking for the first op that differs", 2, 3)
            raise CheckError(failure_text(plan, ready.case, found, ready.captured, ready.blocks)) from cause
        return found

    def _compared(self, ready: Ready, start: float) -> Found:
        """Try a case in the time that is left."""
        left = self._left(start, self._needs(ready))
        try:
            return run_trial(ready.case, ready.reference, ready.captured, left)
        except TimeoutError as error:
            raise NotChecked(f"it would take more than {self.seconds:.0f} s") from error

    def _says(self, found: Found, ready: Ready, start: float) -> str:
        count = len(found.gradients or {})
        against = "the captured graph on one device, as the model draws random numbers" if found.beside_graph else ""
        against = against or "the module on one device"
        case, why = ready.case, ready.case.eager.why if ready.case.eager else ""
        whole = f"; each replica runs all rows, as {why}" if why else ""
        rows = f"rows {list(case.rows)} by rank" if case.rows is not None else "the same rows on all ranks"
        shared = "; the loss, a sum over rows, is shared out among ranks" if found.shared_out else ""
        return (
            f"checked: loss and {count} gradients are those of {against} to {found.most:.0e}{shared} "
            f"({case.plan.summary()}; {ready.blocks.told()}{rows}, "
            f"{time.monotonic() - start:.1f} s){whole}"
        )

    def _ready(self, plan: Plan, start: float) -> Ready:
        """Return the smallest case that one device goes through.

        Raises:
            NotChecked: there is none.
        """
        if self.template is None:
            raise NotChecked(self.problem)
        problems = []
        for cut in _CUTS:
            if time.monotonic() - start >= self.seconds:
                raise NotChecked(f"it would take more than {self.seconds:.0f} s")
            try:
                return self._case(plan, cut)
            except NotChecked as why:
                problems.append(str(why))
            except Exception as error:  # a smaller model may not fit itself: a larger one is made
                problems.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        raise NotChecked(f"no small case of the model runs: {'; '.join(dict.fromkeys(problems))}")

    def _case(self, plan: Plan, cut: Cut, recasts: Program | None = None) -> Ready:
        assert self.template is not None, "there is something to make it of"
        small = with_few_pipelines(plan) if len(plan.devices) > MANY_RANKS else plan
        small = with_few_micro_batches(_in_one_dtype(small))
        graph = None if self.program is None else self.program.graph
        blocks = KeptBlocks((), ()) if graph is None else KeptBlocks.of(small, graph)
        blocks = blocks if cut.blocks else blocks.all()
        narrowing = Narrowing.of(self.template.model) if cut.tables else Narrowing()
        small = blocks.plan(small)
        self._check_bytes(small, blocks, narrowing)
        model, loss_fn = self.template.made(blocks.dropped_blocks, narrowing, cut.dtype)
        model.train()
        if self.program is None:
            _without_dropout(model)
        world = 1 + max(small.devices)
        fixed = self.program is not None and not self.program.graph.takes_any_rows
        given = count_rows(flatten_batch(self.batch)[1], self.row_dims)
        rows = fewest_rows(small, world) if self.program is not None else uneven_row_count(small, world, given)
        batch = self._batch(TrialSizes(rows, sequence_length_for(small) if cut.lengths else None), narrowing, cut.dtype)
        own = None if self.shared or fixed or world == 1 else rows_of_ranks(rows, world)
        case = Case(model, loss_fn, batch, small, own, self.row_dims, cut.dtype, is_recast=recasts is not None)
        made = None if recasts is None else recast_program(recasts, blocks, narrowing, cut.dtype)
        return self._run_alone(case, blocks, cut, made)

    def _run_alone(self, case: Case, blocks: KeptBlocks, cut: Cut, made: Program | None) -> Ready:
        reference = alone(case)
        if not reference.module.steps[0].loss == reference.module.steps[0].loss:
            raise NotChecked("the loss of the small case is no number on one device")
        if self.program is None:
            return Ready(replace(case, eager=_first_mode(case, reference)), reference, None, blocks)
        captured = case.how().capture(case.model, case.batch, made)
        if captured.program.graph.num_blocks != len(blocks.kept):
            raise NotChecked("cut down it has other blocks")
        is_whole = not (cut.blocks and blocks.dropped_blocks) and not cut.tables and not cut.lengths
        if not is_whole and not same_ops(self.program.graph, captured.program.graph, blocks):
            raise NotChecked("cut down it runs other ops")
        return Ready(case, reference, captured, blocks)

    def _batch(self, sizes: TrialSizes, narrowing: Narrowing, dtype: torch.dtype) -> Batch:
        if self.program is not None:
            return cut_batch(self.batch, self.program, sizes, narrowing, dtype)
        assert sizes.rows is not None, "a case has rows"
        return cut_rows(self.batch, self.row_dims, sizes.rows, dtype)

    def _check_bytes(self, plan: Plan, blocks: KeptBlocks, narrowing: Narrowing) -> None:
        """Raise `NotChecked` where a case would take more memory than it may."""
        assert self.template is not None, "there is something to make it of"
        dropped = tuple(f"{path}." for path in blocks.dropped_blocks)
        shapes = [p.shape for name, p in self.template.model.named_parameters() if not name.startswith(dropped)]
        numbers = sum(torch.Size(narrowing.shape(tuple(shape))).numel() for shape in shapes)
        needs = numbers * _BYTES * (_COPIES + _COPIES_OF_REPLICA * len(plan.pipelines))
        needs += 2 * _BYTES * self.template.buffer_bytes
        most = SHARE_OF_MEMORY * min(size for _, size in memory_left(HOST))
        if needs > most:
            raise NotChecked(
                f"{numbers} numbers in the parameters of the shortened model need about {bytes_text(needs)} of the "
                f"host's memory, but a trial may take {bytes_text(most)}"
            )

    def _needs(self, ready: Ready) -> float:
        """Return the seconds that a trial is expected to take, but for what the ops themselves compute."""
        if ready.captured is None:
            return 0.0
        return _SECONDS_OF_OP * len(ready.captured.program.graph.graph.nodes) * ready.case.world

    def _left(self, start: float, needs: float) -> float:
        left = self.seconds - (time.monotonic() - start)
        if needs > left:
            raise NotChecked(
                f"it would take about {needs:.0f} s more, and {max(left, 0):.0f} s of {self.seconds:.0f} s are left"
            )
        return left


def _in_one_dtype(plan: Plan) -> Plan:
    """Return a plan whose stages compute in the dtype of the model, for batches of any length."""
    pipelines = tuple(
        replace(p, max_length=None, stages=tuple(replace(stage, dtype=None) for stage in p.stages))
        for p in plan.pipelines
    )
    return replace(plan, pipelines=pipelines, max_length=None, predicted=None)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _problem_of(execution: EagerExecution) -> str:
    """Return why a module cannot be tried: of entries of lists nobody knows which rows to take; else nothing."""
    lists = execution.module.in_lists
    return f"input {lists[0]!r} is in a list, whose entries may be samples" if lists else ""


def _first_mode(case: Case, reference: TrialReference) -> RowMode:
    """Return how replicas of a module are to share a case: by rows, where one device shows what that has to give."""
    if reference.is_random and len(case.plan.pipelines) > 1:
        return RowMode(False, why=_DRAWS)
    tensors = flatten_batch(case.batch)[1]
    try:
        halves = rows_of_ranks(count_rows(tensors, case.row_dims), 2)
        return RowMode(by_rows=True, adds_up=loss_is_additive(case, halves, reference.module.steps[0].loss, _SUMS))
    except Exception as error:  # it does not take as few rows
        _log.debug("the losses of halves of the batch are not known: %s", error)
        return BY_ROWS


def _without_dropout(model: nn.Module) -> None:
    """Have a module's dropout drop nothing: each device would drop something else."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0


def _text(program: Program) -> str:
    """Return what tells programs apart: their ops, and the forms of their leaves."""
    leaves = ((leaf.name, leaf.kind, str(meta.value(leaf.node))) for leaf in program.graph.leaves)
    return f"{program.fingerprint} {list(leaves)} {program.graph.block_paths}"


@contextmanager
def _surroundings() -> Iterator[None]:
    """Compute on the host as the module says, whatever the script has set, and say nothing."""
    with ExitStack() as stack:
        stack.enter_context(casting(()))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device() != HOST:
            stack.enter_context(torch.device(HOST))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        warnings.simplefilter("ignore")
        yield
