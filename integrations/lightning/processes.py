"""How the processes of a Trainer are started, counted and joined: as by its strategy for DistributedDataParallel."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

import hetu_fx
from hetu_fx.errors import EnvironmentProblem

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
            f"started {world}; pass as devices= the processes of a node, and as num_nodes= the nodes (on CPUs "
            f"devices='auto' means 1): devices=int(os.environ['LOCAL_WORLD_SIZE'])"
        )
