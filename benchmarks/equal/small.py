"""A small model in a whole training loop on two equal processes: what a step costs on the host, beside DDP.

A step is two micro-batches, of which the first keeps its gradients (`no_sync`), clipping, the optimizer as torch makes
it, and an average of the parameters: the loop of small repositories, in which the host's work is most of a step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.profiler import record_function

import hetu_fx
from benchmarks.equal.contest import Against, Contest, Job
from benchmarks.equal.replicas import DDP, ZERO_0, Make, Rows, own_rows
from benchmarks.kit.contest import Step, loss_of
from benchmarks.kit.models import Size, batch, llama

SIZE = Size(width=64, layers=4, rows=16, tokens=64)
AUTO = "hetu_fx, auto"
BAR = 1.10
MOST_NORM, DECAY = 1.0, 0.99


def contest() -> Contest:
    """Make the contest of a small Llama."""
    make, own = partial(llama, SIZE), own_rows(batch(SIZE.rows, SIZE.tokens))
    made = {DDP: partial(theirs, make, own)}
    for name, plan in ((AUTO, "auto"), (ZERO_0, replace(hetu_fx.Plan.data_parallel(range(2)), zero=0))):
        made[name] = partial(ours, make, own, plan)
    return Contest(made, [Against((name,), DDP, BAR) for name in (AUTO, ZERO_0)])


def theirs(make: Make, own: Rows) -> Job:
    """Train by DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(make())
    return Job(loop(model, torch.optim.AdamW(model.parameters()), own))


def ours(make: Make, own: Rows, plan: Any) -> Job:
    """Train by hetu_fx."""
    plain = make()
    optimizer = torch.optim.AdamW(plain.parameters())
    return Job(loop(hetu_fx.auto_parallelize(plain, dict(own), plan=plan, optimizer=optimizer), optimizer, own))


def loop(model: Any, optimizer: torch.optim.Optimizer, own: Rows) -> Step:
    """Make one step of the loop."""
    parameters = list(model.parameters())
    averages, average = [parameter.detach().clone() for parameter in parameters], get_ema_multi_avg_fn(DECAY)

    def step() -> None:
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, own).backward()
        with record_function("forward"):
            loss = loss_of(model, own)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            clip_grad_norm_(parameters, MOST_NORM)
            optimizer.step()
            average(averages, parameters, 1)

    return step
