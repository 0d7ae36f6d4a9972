"""What Lightning's Trainer asks of a strategy, for modules that run in parallel.

The contract is that of its strategy for DistributedDataParallel: every process brings its own rows, and the mean of all
processes' losses is trained on.

Parameters of no module that runs in parallel are whole in each process, and their gradients are averaged.

Which modules of a LightningModule run in parallel: those that its training step calls. A step calls the LightningModule
itself (`self(x)`), a module in it (`self.model(x)`), or several. Nobody knows which before the first step, nor with
what. So while a step runs, modules that are trained wait for their first call, and the outermost that is called is made
parallel there, with what it is called with as the example.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer

import hetu_fx
from hetu_fx.errors import BatchError, EnvironmentProblem, StateError
from hetu_fx.integrations.lightning.checkpoints import FolderCheckpoints

Make = Callable[[nn.Module, Mapping[str, Any] | tuple[Any, ...]], None]


class Parts:
    """The modules of a model that run in parallel.

    Args:
        model: has them in it, or is one itself.
        make: makes a module parallel; called with it and an example of its batch.
    """

    def __init__(self, model: nn.Module, make: Make) -> None:
        self.model = model
        self._make = make
        self._waiting: list[nn.Module] = []

    @property
    def parallel(self) -> tuple[nn.Module, ...]:
        """Return the modules that run in parallel by now."""
        return tuple(module for module in self.model.modules() if "hetu" in vars(module))

    def outside(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters of no module that runs in parallel."""
        inside = {id(parameter) for module in self.parallel for parameter in module.parameters()}
        return tuple(parameter for parameter in self.model.parameters() if id(parameter) not in inside)

    @contextmanager
    def found_by_calls(self) -> Iterator[None]:
        """Make parallel what is called first inside a with block, and is trained."""
        self._wait()
        try:
            yield
        finally:
            self._wait_no_more()

    def _wait(self) -> None:
        self._waiting = [module for module in self._candidates() if "forward" not in vars(module)]
        for module in self._waiting:
            object.__setattr__(module, "forward", self._first_call_of(module))

    def _wait_no_more(self) -> None:
        for module in self._waiting:
            del module.__dict__["forward"]
        self._waiting = []

    def _candidates(self) -> Iterator[nn.Module]:
        """Yield the modules that are trained, and neither run in parallel, nor hold or are in one that does."""
        inside = {part for module in self.parallel for part in module.modules()}
        for module in self.model.modules():
            if inside.isdisjoint(module.modules()) and any(p.requires_grad for p in module.parameters()):
                yield module

    def _first_call_of(self, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._wait_no_more()
            self._check_unshared(module)
            self._make(module, _example(module, args, kwargs))
            self._wait()
            return module.forward(*args, **kwargs)

        uncompiled: Callable[..., Any] = torch.compiler.disable(forward)
        return uncompiled

    def _check_unshared(self, module: nn.Module) -> None:
        """Refuse a module with a parameter of one that runs in parallel by itself.

        Raises:
            StateError: names both.
        """
        own = {id(parameter): name for name, parameter in module.named_parameters()}
        names = {part: name or "the LightningModule" for name, part in self.model.named_modules()}
        for other in self.parallel:
            for parameter in other.parameters():
                if id(parameter) in own:
                    raise StateError(
                        f"training_step calls {names[module]!r}, which shares parameter {own[id(parameter)]!r} with "
                        f"{names[other]!r}, which runs in parallel by itself\n"
                        f"hint: have training_step call one module that calls both, such as the LightningModule by "
                        f"self(...)"
                    )

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients where they are made, until the first backward outside."""
        with ExitStack() as stack:
            for module in self.parallel:
                stack.enter_context(module.no_sync())  # type: ignore[operator]
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make all modules plain ones, with whole parameters, inside a with block; collective."""
        with ExitStack() as stack:
            for module in self.parallel:
                stack.enter_context(module.hetu.whole())  # type: ignore[operator, union-attr]
            yield


def _example(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any] | tuple[Any, ...]:
    """Return what a module is called with, as `hetu_fx.auto_parallelize` takes it."""
    if not kwargs:
        return args
    if not args:
        return kwargs
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs).arguments
    kinds = {signature.parameters[name].kind: name for name in bound}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        raise BatchError(
            f"{type(module).__name__} takes *{kinds[inspect.Parameter.VAR_POSITIONAL]}, and training_step calls it "
            f"with arguments by position and by keyword ({', '.join(kwargs)})\nhint: pass all of them by position"
        )
    more = bound.pop(kinds.get(inspect.Parameter.VAR_KEYWORD, ""), {})
    return {**bound, **more}


T = TypeVar("T")


class Processes(ParallelStrategy):
    """One process for each device: those of the launcher, or those that Lightning starts.

    Args:
        timeout: of the process group; None: torch's.
        options: of Lightning's `ParallelStrategy`.
    """

    def __init__(self, timeout: timedelta | None, **options: Any) -> None:
        super().__init__(**options)
        self._timeout = timeout
        self.num_nodes = 1  # Lightning assigns what the Trainer was told

    @property
    def root_device(self) -> torch.device:
        """Return this process's device."""
        assert self.parallel_devices is not None, "Lightning has said which there are"
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Return how many processes each node has, as the Trainer was told."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Tell whether loaders are to be divided among processes."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return what Lightning divides loaders by."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None, "Lightning has looked where it runs"
        if self.is_distributed:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Take over the ranks of the launch, or number those that Lightning will start.

        Raises:
            EnvironmentProblem: the Trainer was told of other processes than there are.
        """
        assert self.cluster_environment is not None, "Lightning has looked where it runs"
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        check_launch(self.num_processes, self.num_nodes, self.world_size)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010 (what Lightning prints and writes by)

    def setup_environment(self) -> None:
        """Join the other processes, where there are some."""
        super().setup_environment()
        if self.is_distributed and not dist.is_initialized():
            assert self.cluster_environment is not None
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            backend = "gloo" if self.root_device.type == "cpu" else hetu_fx.DeviceType.group_backends()
            dist.init_process_group(backend, timeout=self._timeout, rank=self.global_rank, world_size=self.world_size)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if self.is_distributed:
            dist.barrier(device_ids=None if self.root_device.index is None else [self.root_device.index])

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return what one process has: of what `hetu_fx.broadcast_object` takes, and StateError else."""
        return hetu_fx.broadcast_object(obj, src) if self.is_distributed else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor's mean, sum, ... over all processes; what is no tensor as it is."""
        if not isinstance(tensor, Tensor) or not self.is_distributed:
            return tensor
        is_mean = reduce_op in ("mean", "avg", dist.ReduceOp.AVG, None)  # which gloo has not
        op = dist.ReduceOp.SUM if is_mean else reduce_op
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op, group)
        return tensor.copy_(tensor / dist.get_world_size(group)) if is_mean else tensor


def check_launch(devices: int, nodes: int, world: int) -> None:
    """Refuse a Trainer that is told of other processes than the launcher has started.

    Raises:
        EnvironmentProblem: on every process.
    """
    if devices * nodes != world:
        raise EnvironmentProblem(
            f"Trainer(devices={devices}, num_nodes={nodes}) is for {devices * nodes} processes, and the launcher has "
            f"started {world}\nhint: pass devices=int(os.environ['LOCAL_WORLD_SIZE']), the processes of a node, and "
            f"num_nodes= the nodes (on CPUs devices='auto' means 1)"
        )


def _average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients over all processes, those of a process that has none as zeros; collective.

    After each backward, also while gradients are accumulated: what has been averaged before is the same on all, and
    stays as it is.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    has = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    has = has.to(trained[0].device)
    dist.all_reduce(has, dist.ReduceOp.MAX)
    for parameter, somewhere in zip(trained, has.tolist(), strict=True):
        if somewhere:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


Plans = hetu_fx.Plan | Sequence[hetu_fx.Plan] | str | Path

REFUSED = {
    "batch": "the first call of a training step is the example",
    "data": "each process reads its own rows, by Lightning's DistributedSampler",
    "loss_fn": "the loss is made by the training step, or by the module that it calls",
    "model": "it is what the training step calls",
    "optimizer": "it is the one that configure_optimizers gives",
    "process_group": "all processes of the Trainer take part",
}
_RARE = [field.name for field in dataclasses.fields(hetu_fx.Options)]  # arguments of before there were options
PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


class HetuStrategy(Processes):
    """Runs what a LightningModule's training step calls in parallel, by `hetu_fx.auto_parallelize`.

        trainer = Trainer(strategy=HetuStrategy(plan=hetu_fx.Plan.data_parallel([0, 1], shares=[3, 1])), devices=2)

    Args:
        plan: as `auto_parallelize` takes it.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as Lightning's strategies
            take them.
        timeout: of the process group; None: torch's.
        options: the other keyword arguments of `auto_parallelize`: `cluster`, `outputs`, `capture`, `compile`, ...

    Raises:
        StateError: an option is not known, or is Lightning's to say.
    """

    def __init__(
        self,
        plan: Plans = "auto",
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        _check_options(options)
        self._options = {"plan": plan, **options}
        self._parts: Parts | None = None
        self._predicting = ExitStack()

    @property
    def parts(self) -> Parts:
        """Return which modules run in parallel."""
        assert self._parts is not None, "a model is connected"
        return self._parts

    # The model

    def connect(self, model: LightningModule) -> None:
        """Take the model that the Trainer was given."""
        super().connect(model)
        if self._parts is None or self._parts.model is not model:
            self._parts = Parts(model, self._make)

    def setup(self, trainer: Trainer) -> None:
        """Make all processes' models equal, and the optimizers; modules are made parallel by the first training step.

        Raises:
            StateError: the precision puts other modules in the model.
        """
        check_precision(self.precision_plugin)
        super().setup(trainer)
        if self.is_distributed and not self.parts.parallel:
            for tensor in chain(self.parts.model.parameters(), self.parts.model.buffers()):
                dist.broadcast(tensor.detach(), 0)

    def model_to_device(self) -> None:
        """Bring this process's copy to its device."""
        self.parts.model.to(self.root_device)

    def _make(self, module: nn.Module, batch: Mapping[str, Any] | tuple[Any, ...]) -> None:
        own = {id(parameter) for parameter in module.parameters()}
        holders = [one for one in self.optimizers if any(id(p) in own for g in one.param_groups for p in g["params"])]
        options = self._options
        if len(holders) != 1 and "homes_follow" not in options:
            given = options.get("options", hetu_fx.Options())
            options = {**options, "options": dataclasses.replace(given, homes_follow=False)}
        hetu_fx.auto_parallelize(module, batch, optimizer=holders[0] if holders else None, **options)

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step; what it calls first, and is trained, runs in parallel from then on."""
        with self.parts.found_by_calls():
            return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the gradients of what does not run in parallel, as DistributedDataParallel does."""
        _average_gradients(self.parts.outside())

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Accumulate gradients where they are made."""
        with self.parts.accumulating():
            yield

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step; what the first step makes parallel is so before the optimizer begins."""
        if not self.parts.parallel:
            closure = _called(closure)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_predict_start(self) -> None:
        """Have each process predict its own rows alone, as some may have more batches than others."""
        self._predicting.enter_context(self.parts.whole())

    def on_predict_end(self) -> None:
        """Run in parallel again."""
        self._predicting.close()

    # Files

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write plain, whole tensors, by process 0: all at once in a file, or one after another in a folder."""
        if not isinstance(self.checkpoint_io, FolderCheckpoints):
            checkpoint = _whole_tensors(checkpoint, keep=self.is_global_zero)
        super().save_checkpoint(checkpoint, filepath, storage_options)  # of a folder the others send what is asked for

    def teardown(self) -> None:
        """Leave the parallel modules where they are; a model without any goes back to the CPU."""
        self._predicting.close()
        if self._parts is None or not self._parts.parallel:
            super().teardown()
            return
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()


def check_precision(plugin: Precision) -> None:
    """Refuse plugins that put layers of their own into the model.

    Raises:
        StateError: it is none of those that are known to cast only.
    """
    if type(plugin) not in PRECISIONS:
        raise StateError(
            f"{type(plugin).__name__} is not known to leave the model's layers as they are\nhint: use precision="
            f"'bf16-mixed', '16-mixed', 'bf16-true', '16-true', '32-true' or '64-true'"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    known = {*inspect.signature(hetu_fx.auto_parallelize).parameters, *_RARE} - {"old"}
    for name in options:
        if name in REFUSED:
            raise StateError(f"HetuStrategy takes no {name}=: {REFUSED[name]}\nhint: leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, [*known], 1)
            meant = f", did you mean {near[0]!r}?" if near else ""
            raise StateError(
                f"HetuStrategy: hetu_fx.auto_parallelize has no argument {name!r}{meant}\nhint: leave it out"
            )


def _whole_tensors(checkpoint: Any, *, keep: bool) -> Any:
    """Return a checkpoint with plain tensors, whole, on the process that keeps them; collective."""

    def whole(tensor: Tensor) -> Tensor:
        gathered = hetu_fx.full_tensor(tensor.detach())
        return gathered if keep else tensor

    return apply_to_collection(checkpoint, Tensor, whole)


def _called(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Call a closure, and return one that gives that result first."""
    made = [closure()]

    def again() -> Any:
        return made.pop() if made else closure()

    return again
