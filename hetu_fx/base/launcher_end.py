"""Processes that end with what has started them, however that ends, and also while they are stopped themselves."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the system kill this process once its parent, whose id is given, is gone; Linux alone can.

    To be precise, once the thread that has started it is.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os.kill(os.getpid(), signal.SIGKILL)


def end_with_torchrun() -> None:
    """Do so where torchrun, or what stands on it, has started this process: killed, it leaves its workers behind."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())
