"""Workers are forks of the launcher, which has imported what takes seconds."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from hetu_fx.launch.channel import LifeSign, MessageChannel
from hetu_fx.launch.spec import WorkerProcess


def start_worker(work: Callable[[MessageChannel], int], others: Iterable[int]) -> WorkerProcess:
    """Start a process that does `work` and ends with the status that it returns.

    It leaves go of `others`, file descriptors that are the launcher's alone.
    """
    life = LifeSign()
    here, there = socket.socketpair()
    process = os.fork()
    if not process:
        _be_worker(work, there, [here.fileno(), *others], life)
    there.close()
    here.setblocking(False)
    return WorkerProcess(process, os.pidfd_open(process), MessageChannel(here), life, time.monotonic())


def _be_worker(
    work: Callable[[MessageChannel], int], end: socket.socket, others: Iterable[int], life: LifeSign
) -> NoReturn:
    status, channel = 1, MessageChannel(end)
    try:
        life.hold()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for descriptor in others:
            os.close(descriptor)
        status = work(channel)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send("ends")
        os._exit(status)
