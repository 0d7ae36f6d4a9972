"""Processes that are forked from one that has computed already, as launchers of notebooks start them."""

from __future__ import annotations

from multiprocessing import current_process
from multiprocessing.context import ForkProcess

import torch

from hetu_fx.base.torch_private import in_bad_fork
from hetu_fx.errors import EnvironmentProblem


def settle_after_fork() -> None:
    """Let a process compute that was forked from a notebook: with one thread, as torchrun's processes have by default.

    A fork has only the thread that forked. OpenMP's pool, which a notebook has once anything has been computed in it,
    is thought to be there, and the first op that uses it waits for ever (pytorch issue 17199, seen in torch 2.13).

    Raises:
        EnvironmentProblem: the notebook has used CUDA, and forked processes of it cannot.
    """
    if not isinstance(current_process(), ForkProcess):
        return
    if in_bad_fork():
        raise EnvironmentProblem(
            "this process was forked from one that has used CUDA already, and so cannot use it\n"
            "hint: restart the notebook, and call nothing of CUDA (.to('cuda'), Accelerator()) before notebook_launcher"
        )
    torch.set_num_threads(1)
