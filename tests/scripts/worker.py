"""A process that runs scripts, one after another, as one rank of a setting."""

from __future__ import annotations

import faulthandler
import os
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hetu_fx import HetuFxError
from tests.ranks.remembered import remembered_captures
from tests.scripts.job import Job
from tests.scripts.script import Script, scripts
from tests.scripts.settings import SETTINGS
from tests.scripts.verdict import Outcome, Raised, Returned

WAIT_SECONDS = 8.0
"""The bound of hetu_fx's waits; scripts that are refused by it take that long."""

STUCK_SECONDS = 10.0
"""So long before a script's bound a rank prints where its threads stand, also where none of them runs Python."""


def serve(rank: int, world: int, setting: str, port: int, orders: Connection) -> None:
    """Run scripts as they are named, with a folder and a number, until the other end closes.

    Args:
        rank, world: of this process.
        setting: the name of one of the settings; "" for the plain script.
        port: of the store, on this machine.
        orders: gives (name, folder, number), and takes outcomes.
    """
    _be_launched(rank, world, port)
    torch.set_num_threads(1)
    known = scripts()
    orders.send("ready")
    while True:
        try:
            name, folder, number = orders.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(known[name].seconds - STUCK_SECONDS)
        outcome = _outcome(known[name].run, setting, rank, world, port, folder, number)
        faulthandler.cancel_dump_traceback_later()
        orders.send(outcome)


def outcome_alone(script: Script, setting: str, folder: Path) -> Outcome:
    """Run a script in this process, which is all of a setting; "" is the plain script's."""
    _be_launched(0, 1, 0)
    torch.set_num_threads(1)
    return _outcome(script.run, setting, 0, 1, 0, str(folder), 0)


def _be_launched(rank: int, world: int, port: int) -> None:
    """Set what launchers set."""
    os.environ.update(ACCELERATE_USE_CPU="1", HF_HUB_OFFLINE="1", HETU_FX_WAIT_SECONDS=str(WAIT_SECONDS))
    if world > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip


def _outcome(run: Any, setting: str, rank: int, world: int, port: int, folder: str, number: int) -> Outcome:
    plan = SETTINGS[setting].plan() if setting else None
    _forget()
    if world > 1:
        store = dist.PrefixStore(f"script{number}", dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        with remembered_captures():
            results = run(Job(plan, rank, world, Path(folder)))
        return Returned({name: _told(value) for name, value in results.items()})
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Raised(isinstance(error, HetuFxError), text, _where(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _forget() -> None:
    """Bring back what a script may have changed for the whole process."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def _told(value: Any) -> Any:
    return value.detach().cpu().contiguous() if isinstance(value, Tensor) else value


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " <- ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))
