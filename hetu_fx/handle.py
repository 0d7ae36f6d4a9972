"""What a parallel model can be asked and told: the handle that it carries as `model.hetu`."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetu_fx.base.progress import telling
from hetu_fx.base.words import seconds_text
from hetu_fx.checkpoint.checkpoint import load_model, save_model
from hetu_fx.checkpoint.job_ends import SaveOnSignal
from hetu_fx.checkpoint.snapshots import STOPPED_SECONDS, Snapshots, Wait
from hetu_fx.errors import StateError
from hetu_fx.export.write import export_runtime
from hetu_fx.graph.bind import Batch, as_call
from hetu_fx.planner.left_out import with_reasons
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.gathered_op import gathered_text
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captured import CaptureEvent
from hetu_fx.program.loss_type import LossType
from hetu_fx.program.observed import Observation, Observer
from hetu_fx.program.program import Program
from hetu_fx.report.run_log import RunLog, Sink, gathered_ops
from hetu_fx.report.sinks import CallSink, JsonLines, LogEntry, ProgressSink, check_event
from hetu_fx.switching.adapt.adaptation import Adaptation
from hetu_fx.switching.adapt.rehome import Home, Optimizers, Rehoming
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.migrate.move_plan import SwitchPlan
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.sequences.reader import SequenceReader
from hetu_fx.switching.step.policy import Policy


class Handle:
    """What a parallel model can be asked and told; `model.hetu`."""

    def __init__(self, runtime: Runtime, adaptation: Adaptation, rehoming: Rehoming) -> None:
        self._runtime = runtime
        self._adaptation = adaptation
        self._rehoming = rehoming

    def __repr__(self) -> str:
        ranks = f"{self._runtime.table.size} ranks" if self._runtime.table.size > 1 else "1 rank"
        told = f"variant {self.current!r} of {len(self._runtime.variants)}, {ranks}, step {self._runtime.step}"
        return f"<model.hetu: {told}; explain() says what the plan is>"

    @property
    def plan(self) -> Plan:
        """Return the plan that runs now."""
        return self._runtime.variants[self._runtime.current].plan

    @property
    def variants(self) -> dict[str, Plan]:
        """Return all plans by name."""
        return {name: variant.plan for name, variant in self._runtime.variants.items()}

    @property
    def checks(self) -> dict[str, str]:
        """Return what was found when each plan was tried before it trained, by the variant's name; or why it was not.

        See docs/checked.md.
        """
        return {name: self._adaptation.tried.found(plan).says for name, plan in self.variants.items()}

    @property
    def current(self) -> str:
        """Return the name of the variant that runs now."""
        return self._runtime.current

    @property
    def stats(self) -> dict[str, Any]:
        """Return what the last step did, and what this process has paid once so far.

        `variant`, `rows` per pipeline and this process's `compute_seconds` are those of the last step, as are its
        `host_seconds`: in our calls, without the model's own ops and without waiting for others. `groups` lists
        the process groups created so far, and the seconds that each took; `prepared` has the
        seconds before the first step, by what they went into, `first_use` the `FirstUse` by variant, `planning` the
        `PlanningStats` of sequences of mixed lengths (None where they cannot run), `replanned` a `PlanChange` for each
        plan that was taken over since. `graphs` has a `GraphEvent` each time that graphs were
        built or evicted; `idle_bytes` is what variants that do not run keep, `copies_dropped` how often good copies of
        parameters were dropped to hold them to their bound. `switch_cost` has the `SwitchCost` by variant: the seconds
        of training steps after a change to it, beside those of steps without one. `homes` has a `HomeEvent` each time
        that homes were changed, with the reason where they have followed a plan, and that what was left for later had
        arrived: bytes and seconds of both. `captures` has a `CaptureEvent` for each time that the model was captured:
        for which batches, what had changed since the last time, and the seconds. The last 4,096 of each are kept.
        """
        report = self._runtime.report
        self._runtime.charge_groups()
        return {
            "variant": report.variant,
            "rows": report.rows,
            "compute_seconds": report.timer.seconds,
            "host_seconds": self._runtime.host.seconds,
            "steps": self._runtime.step,
            "switches": self._runtime.switches,
            "groups": tuple(self._runtime.table.creations),
            "prepared": dict(self._runtime.prepared_seconds),
            "first_use": {name: variant.first_use for name, variant in self._runtime.variants.items()},
            "planning": self._reader.planner.stats if self._reader else None,
            "replanned": tuple(self._adaptation.changes),
            "graphs": tuple(self._runtime.idle.events),
            "switch_cost": {name: self._runtime.times.cost(name) for name in self._runtime.variants},
            "idle_bytes": self._runtime.idle.num_bytes,
            "copies_dropped": self._runtime.idle.copies_dropped,
            "homes": tuple(self._runtime.in_flight.events),
            "captures": self._captures,
        }

    def observe(self, name: str, tell: Observer) -> Observation:
        """Call `tell` with the output of a submodule after each forward; returns a handle with `remove()`.

            seen = model.hetu.observe("model.layers.3", lambda output: print(output.norm()))

        Before the same step on all processes. The output has the submodule's structure; its tensors are whole in every
        dim but the rows, which are those that this process has brought (as outputs of the model come back), and carry
        no gradient. It is an output of the graph, so the model is captured again, and a step sends it where it is
        asked for. Batches of sequences of mixed lengths cannot be observed.

        Raises:
            StateError: there is no submodule of the name, or the module runs as it is (capture="eager").
        """
        if not isinstance(self._runtime.execution, GraphExecution):
            raise StateError(
                f"with capture='eager' the module itself runs: a hook that is registered on {name!r} "
                f"sees what this process computes"
            )
        return self._runtime.execution.observers.observe(name, tell)

    @property
    def _captures(self) -> tuple[CaptureEvent, ...]:
        execution = self._runtime.execution
        return tuple(execution.programs.events) if isinstance(execution, GraphExecution) else ()

    @property
    def loss_type(self) -> LossType | None:
        """What the loss of the graph that ran last is proven to be; None of a module that runs as it is.

        A sum over rows, divided by a number that the script passes or by none, is shared out as under
        DistributedDataParallel: each rank returns the sum over all rows divided by the number of ranks, so that the
        mean over ranks is the loss of the step. Any other loss is that of one device on all rows, on every rank.
        """
        return None if self._program is None else self._program.loss_type

    @property
    def _program(self) -> Program | None:
        """Return the graph that ran last; None of a module that runs as it is."""
        execution = self._runtime.execution
        return execution.programs.current if isinstance(execution, GraphExecution) else None

    @property
    def health(self) -> dict[int, float]:
        """Return the measured rate of each device: 1 as planned, 2 twice as slow."""
        return self._adaptation.rates

    @property
    def is_planning(self) -> bool:
        """Tell whether a plan is being made while training goes on; the same on every process.

        It is taken over before the first step after it is ready, by all processes before the same one.
        """
        return self._adaptation.is_planning

    @property
    def policy(self) -> Policy:
        """What chooses the variant of each batch (`switching.step.policy.Policy`); assign another on every process.

        The default takes the variant predicted fastest, of those that take the batch's longest sequence.
        """
        return self._runtime.variants.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._runtime.variants.set_policy(policy)

    @property
    def sequences(self) -> SequenceReader:
        """How batches of sequences of mixed lengths run: its `options` and its `policy` can be replaced."""
        if self._reader is None:
            raise StateError("sequences of mixed lengths run as captured graphs\nhint: use capture='graph'")
        return self._reader

    @property
    def _reader(self) -> SequenceReader | None:
        execution = self._runtime.execution
        return execution.sequences if isinstance(execution, GraphExecution) else None

    def ahead(self, batches: Iterable[Batch], count: int = 2) -> Iterator[Batch]:
        """Yield the batches, `count` of them read in advance, whose plans are made meanwhile in a thread.

        The plan of a batch of sequences of mixed lengths says which variant runs it and which pipeline has which
        sequences. It follows from their lengths, so every process makes the same one.

        Args:
            batches: mappings with nested tensors (`hetu_fx.nested_batch` makes them), such as a DataLoader gives.
            count: how many batches to read in advance.
        """
        waiting: deque[Batch] = deque()
        runtime = self._runtime
        for batch in batches:
            waiting.append(batch)
            for one in waiting:
                self.sequences.ahead(
                    one, runtime.model.training, runtime.variants.able(), runtime.variants.health.rates
                )
            if len(waiting) > count:
                yield waiting.popleft()
        yield from waiting

    def explain(self) -> str:
        """Return the current plan as a table, with what was predicted, and what its first use has taken here.

        And what was found when it was tried before it trained, and what is gathered because no rule splits it.
        """
        self._runtime.charge_groups()
        known, cluster = self.plan, self._adaptation.cluster
        if cluster is not None:
            known = with_reasons(known, Problem(Profile(self._adaptation.costs), cluster))
        plan = known.explain(range(self._runtime.table.size))
        tried, variant = self.checks[self.current], self._runtime.variants[self.current]
        rows = [f"rows: {variant.rows_told}"] if variant.rows_told else []
        gathered = gathered_ops(self.current, self._runtime, self._adaptation)
        return "\n".join((plan, *rows, f"tried: {tried}", self._first_use(), *gathered_text(gathered)))

    def _first_use(self) -> str:
        runtime, use = self._runtime, self._runtime.variants[self.current].first_use
        phases = ", ".join(f"{what} {seconds_text(seconds)}" for what, seconds in runtime.prepared_seconds.items())
        total, built = sum(runtime.prepared_seconds.values()), runtime.times.cost(self.current).built_seconds
        step = "" if built is None else f", first step in {seconds_text(built)}"
        return f"first use: {use}{step}; before it {seconds_text(total)} ({phases})"

    def add_variant(self, plan: Plan, name: str | None = None) -> str:
        """Add a plan; returns its name. Collective, as every process must have the same variants.

        Unless `auto_parallelize` was told otherwise, the plan is tried first, as those of the start are.

        Raises:
            CheckError: on every process: the plan does not give what one device gives.
        """
        name = name or plan.name or f"variant{len(self._runtime.variants)}"
        self._runtime.variants.check(plan, name)
        self._adaptation.tried.ask(plan)
        self._runtime.add_variant(plan, name)
        return name

    def warm(self, batch: Batch) -> None:
        """Make every variant ready to run batches like this one, ahead of the first step that needs it; collective.

        Between steps. Graphs are made, and the batch is run forward and backward, which makes process groups and what
        `compile` compiles: a switch then costs what a step costs. Parameters, gradients, buffers and random numbers
        stay as they are. Batches of sequences of mixed lengths, batches longer than a variant takes, and a model with
        capture="eager" are not run. Progress goes to the logger "hetu_fx.variants".

        Args:
            batch: as the model is called with it: by keyword, or positional as a tuple.
        """
        args, kwargs = as_call(batch)
        self._runtime.warm(args, kwargs)

    def switch(self, name: str) -> None:
        """Run the variant of this `name` from the next step on, until told otherwise (`release`); collective.

        Raises:
            StateError: there is none, or it uses a device that is drained.
        """
        self._runtime.variants.pin(name)

    def release(self) -> None:
        """Let the policy choose the variant of each batch again."""
        self._runtime.variants.pin(None)

    def replan(self, rates: Mapping[int, float]) -> str:
        """Plan again for devices that are slower than planned (rate 2: twice as slow); returns the variant's name.

        Collective; every process must pass the same rates.
        """
        return self._adaptation.replan(rates)

    @property
    def drained(self) -> tuple[int, ...]:
        """Return the devices that are drained: they hold nothing and no variant that uses them runs."""
        return tuple(sorted(self._runtime.variants.drained))

    def switch_home(
        self, home: Home, *, optimizer: Optimizers | None = None, overlap: bool | None = None
    ) -> SwitchPlan:
        """Change which process owns what of the parameters, of their gradients and of the optimizer's state.

        Collective, between steps: after a backward, before the next forward. Parameters, gradients, state tensors and
        optimizers stay the same objects, values stay as they are bit by bit, and nothing goes through a file. Changing
        the variant needs no change of home; this is for a plan that stays, and for devices that have no memory for
        their part. Homes stay there, whatever plans devices' rates lead to, until `homes_follow` is made True again.
        Other home tensors (averages of parameters that the user keeps) stay where they are.

        Args:
            home: a Plan, or the name of a variant: near where that reads the parameters, in proportion to the devices'
                speed; or devices: on these only, near where the current plan reads; or a mapping of devices to their
                shares.
            optimizer: one optimizer or several that hold state for the parameters. Those that were passed here or to
                `auto_parallelize` are known already; () says that there is none.
            overlap: go on as soon as parameters and gradients are there. What optimizers keep arrives beside the next
                step, and whatever reads it waits for it: `optimizer.step()`, saving, a snapshot, another change. False:
                it is all there when this returns. None: True where messages are sent, False where all processes read
                each other's memory (docs/concepts.md has what both take). Parameters that are not in
                host memory always move with all that belongs to them.

        Returns what has been moved, or is being: bytes, messages, and the extra memory that it takes.

        Raises:
            HetuFxError: on every process. What fails on the way beside a step is raised by what waits for it.
        """
        with telling("changing homes"):
            return self._rehoming.switch_home(home, optimizer, overlap=overlap)

    @property
    def homes_follow(self) -> bool:
        """Whether homes follow plans that are made for the devices' rates; assign it on every process.

        True unless `auto_parallelize` was told otherwise, where an optimizer is known. `switch_home` makes it False, as
        the user has placed the homes then; True hands them back.
        """
        return self._rehoming.homes_follow

    @homes_follow.setter
    def homes_follow(self, follow: bool) -> None:
        self._rehoming.homes_follow = follow

    def drain(self, *ranks: int, optimizer: Optimizers | None = None) -> SwitchPlan:
        """Take devices out of all work now: others take over what they own. Collective, between steps.

        Where devices are known (cluster=..., or plan="auto") a plan without these is made; else a variant must be
        there, or be added, that does not use them. A variant that does is not run until they are admitted again. Their
        processes go on calling the model, and may bring rows as before; they compute nothing.

        Args:
            ranks: of the devices.
            optimizer: as `switch_home`'s.

        Errors are as `switch_home`'s; all is moved when this returns, so that the process may end.
        """
        return self._rehoming.drain(ranks, optimizer)

    def admit(self, *ranks: int, optimizer: Optimizers | None = None, overlap: bool | None = None) -> SwitchPlan:
        """Give drained devices (`ranks`) work and a part of the state again; collective, between steps.

        See `drain`, and `switch_home` for `optimizer` and `overlap`.
        """
        return self._rehoming.admit(ranks, optimizer, overlap=overlap)

    def drain_on_sigterm(self, *, optimizer: Optimizers | None = None) -> None:
        """Drain a device before the first step after its process gets SIGTERM; collective, once.

        `optimizer` is as `switch_home`'s. A second SIGTERM does what it did before this call. If all devices are asked
        to leave, all stay: that is what `save_on_signal` is for.
        """
        self._rehoming.drain_on_sigterm(optimizer)

    def on_communication(self, listener: Callable[[str, float, float], None] | None) -> None:
        """Call `listener(what, start, end)` after each communication of this process; None: no more.

        Times are those of time.perf_counter. A timeline of what a step waits for is made from them. The first
        communication of some ranks contains a "group creation".
        """
        self._runtime.listen_to_communication(listener)

    def on(self, event: str, function: Callable[[LogEntry], object]) -> RunLog:
        """Call `function` with what happens from now on, on this rank; returns what stops it by `close()`.

            told = model.hetu.on("step", lambda step: wandb.log(step.numbers, step=step["step"]))

        A step is told when the next batch begins, as only then it is known how long it took, and the last one when this
        is closed; a `with` block closes it. Each rank that calls this calls its function; nothing is sent for it, so
        ranks may differ. All of a step but its `seconds`, and what follows from them, is equal on all ranks.

        Args:
            event: "step", "switch", "plan", "lost", or another of `hetu_fx.report.sinks.EVENTS`. "lost" comes before
                a call of the model raises its `CommError`, or when a `with` block is left by one.
            function: gets the entry, a mapping with `numbers` for trackers. An Exception of it is warned of, once.

        Raises:
            StateError: there is no such event.
        """
        check_event(event)
        return self._listening([CallSink(event, function)])

    def log(self, path: str | Path | None = None, *, progress: bool = False) -> RunLog:
        """Log from now on what runs, how long it takes beside what was predicted, and what changes.

        Returns the log, a context manager; it tells of the last step when it is closed. Only process 0 writes. The
        others may call this or not; of those that do it tells their memory too, and what they did in one step of each
        variant.

        Args:
            path: of a file of JSON lines (`hetu_fx.report.run_log` lists them); `hetu-fx log` and
                `hetu-fx report` read it.
            progress: say on stderr what happens.

        Raises:
            EnvironmentProblem: the file cannot be written.
        """
        sinks: list[Sink] = []
        if self._runtime.table.rank == 0:
            sinks += [JsonLines(path)] if path is not None else []
            sinks += [ProgressSink()] if progress else []
        return self._listening(sinks, traces=path is not None)

    def _listening(self, sinks: Sequence[Sink], *, traces: bool = False) -> RunLog:
        log = RunLog(self._runtime, self._adaptation, sinks, traces=traces)
        self._runtime.watch(log)
        return log

    def whole(self) -> AbstractContextManager[nn.Module]:
        """Make the model the plain module inside a with block, with whole parameters on every process.

            with model.hetu.whole():
                tokens = model.generate(prompt)

        Entering is collective: every process enters, and gathers what it has not. Inside nothing is sent, so that a
        process may do what it likes with its own inputs, or nothing: call the model or its submodules, with hooks,
        caches and branches on values. A with block inside another is free. On leaving, the parameters are what they
        were, the same objects.

        Parameters are to be read inside: a backward that reaches them is refused (`torch.autograd.grad` of inputs is
        not), and so is writing to them or to buffers that are saved. Copies are kept for the next time as long as
        they take no more than `idle_bytes`, until the next training step.

        Raises:
            StateError: on every process, where one has no room for all parameters. On leaving, on the process whose
                parameters or buffers have been written.
        """
        return self._runtime.whole.opened()

    def save(self, folder: str | Path, **options: Any) -> None:
        """Save whole tensors as safetensors, as `from_pretrained` reads them; all of it or nothing.

        Collective: every process calls it.

        Args:
            folder: replaced as a whole once the new checkpoint is complete.
            options: `optimizer`, whose state is saved too, by parameter name; `extra`, any JSON object to keep with it
                (step, schedule, data position); `max_shard_size`, the bytes of a weight file, or text such as "5GB".

        Raises:
            CheckpointError: on every process, if it cannot be written.
        """
        save_model(self._runtime, Path(folder), **options)

    def load(self, folder: str | Path, **options: Any) -> dict[str, Any]:
        """Load a checkpoint under any plan and number of processes; collective.

        Args:
            folder: what `save` has written, or weights that `save_pretrained` wrote.
            options: `optimizer`, which gets its state back, if it was saved; `verify`, to compare SHA-256 sums too.

        Returns what was saved as `extra`; nothing without an optimizer.

        Raises:
            CheckpointError: on every process; nothing has been changed then.
        """
        return load_model(self._runtime, Path(folder), **options)

    def save_on_signal(
        self,
        folder: str | Path,
        *,
        optimizer: torch.optim.Optimizer,
        extra: Callable[[], Mapping[str, Any]] = dict,
        signals: Iterable[int] = (signal.SIGTERM,),
        status: int = 0,
    ) -> SaveOnSignal:
        """Save a checkpoint and end the script on all processes once one of them gets a signal; collective.

            model.hetu.save_on_signal("stopped", optimizer=optimizer, extra=lambda: {"batch": done})

        All save in the first training forward after the optimizer's step, before anything of it is done, and leave by
        a `SystemExit`. No message more is sent for it. Call it in the main thread, before the loop. Returned is what
        stops listening by `close()`.

        Args:
            folder: as `save`'s: replaced as a whole once the new one is complete.
            optimizer: its state is saved too; its steps tell where a step of training ends.
            extra: called on all processes when it is saved; gives any JSON object, which `load` returns.
            signals: to listen to, e.g. SIGUSR1 of Slurm's --signal too. A handler that was there before is called
                once the checkpoint is written, and is in place again after `close()`. A second signal more than 5
                seconds later (launchers pass on what a process group has had) does at once what it did before.
            status: of the exit: 0, or 143 for a job that is to count as ended by SIGTERM.

        Raises:
            StateError: on every process, where one does not call it in its main thread.
        """
        saves = SaveOnSignal(self._runtime, Path(folder), optimizer, extra=extra, signals=signals, status=status)
        self._runtime.watch(saves)
        return saves

    def snapshots(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 1,
        folder: str | Path | None = None,
        checkpoints: str | Path | None = None,
        wait: Wait = "cheap",
        stopped_after: float | None = STOPPED_SECONDS,
    ) -> Snapshots:
        """Keep the state of the newest finished step in memory, for a job that is restarted; collective.

            snapshots = model.hetu.snapshots(optimizer, every=10, checkpoints="checkpoints")
            first = snapshots.resume().extra.get("batch", 0)
            for batch in range(first, last):
                ...
                optimizer.step()
                snapshots.step({"batch": batch + 1})

        Every process keeps its part, and a copy of another's, on another node where there is one: whatever one node
        takes with it, the others have. A snapshot counts only once all processes have finished its step.

        Args:
            optimizer: its state is kept too.
            every: steps between snapshots.
            folder: in each node's memory; None: one that is found by all starts of the job on this node: by its name
                (HETU_FX_JOB, torchrun's --rdzv-id, or the Slurm step), else by those of one launcher and script. What
                another job left in a given folder is gone on from as well.
            checkpoints: the parent of folders of `save`, of which the newest is loaded where no snapshot is whole.
            wait: `step` returns when its snapshot is whole, so no finished step is ever done again. Without it storing
                one overlaps the next steps, and a failure in that time costs the steps since the one before. "cheap"
                waits where storing takes at most a twentieth of the time between two snapshots.
            stopped_after: seconds without a sign of life after which a process is ended under torchrun, so that all
                are started again; None: never. `hetu-fx launch` has an option of its own.
        """
        folder, checkpoints = (None if path is None else Path(path) for path in (folder, checkpoints))
        snapshots = Snapshots(
            self._runtime,
            optimizer,
            every=every,
            folder=folder,
            checkpoints=checkpoints,
            wait=wait,
            stopped_after=stopped_after,
        )
        self._runtime.watch(snapshots)
        return snapshots

    def export(self, folder: str | Path, *, weights: bool = True, onnx: bool = False) -> None:
        """Export the model's own graphs for one device, and the device graphs of all variants, as a folder.

        Collective; the model's last training batch says what the graphs take. The graphs for one device run without
        hetu_fx (docs/export.md).

        Args:
            folder: must not exist, or be an export, which is replaced.
            weights: put the weights into the single-device graphs; else they are written in safetensors files beside
                them, and rank 0 needs no room for all of them.
            onnx: write the single-device graph for inference as ONNX, too; needs the extra "onnx".

        Raises:
            ExportError: on every rank; the folder is as it was.
        """
        with telling("exporting"):
            export_runtime(self._runtime, Path(folder), weights=weights, onnx=onnx)
