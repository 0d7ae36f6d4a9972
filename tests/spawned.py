"""Other processes that tests start: functions in several at once, and commands as a user would run them."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.context
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

NEW_OBJECTS = 50_000
"""How many it takes for garbage to be looked for: a capture makes a few hundred thousand, which stay for a while."""


def keep_what_is_there() -> None:
    """Look for garbage neither in what there is now, nor for every few objects: captures make many, and keep them.

    What is frozen is not written to either, so that processes which are forked share it.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 20, 20)


def results_of(work: Callable[..., None], world: int, *arguments: Any, seconds: float) -> dict[int, Any]:
    """Call work(rank, *arguments, results) in `world` processes, each of which puts (rank, result); leave none behind.

    Raises `queue.Empty` if a process says nothing for so many seconds.
    """
    context = prepared()
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, *arguments, results), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        return dict(results.get(timeout=seconds) for _ in processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def prepared() -> multiprocessing.context.ForkServerContext:
    """Return what starts processes that have imported what most need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.imports"])
    return context


def forked(work: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Call work(*arguments) in a process of its own that has imported what most need: to import it is dear."""
    process = prepared().Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def free_port() -> str:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(*command: str, seconds: float, **environment: str) -> tuple[int, str]:
    """Run a command in its own session; return its status and what it said. Fails with that if it takes longer."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1", **environment}
    process = subprocess.Popen(
        command, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # it says where its threads stand
        try:
            output, _ = process.communicate(timeout=5)
        except subprocess.TimeoutExpired as still:
            output = still.output or b""
        pytest.fail(f"{' '.join(command)} did not end in {seconds:g} s, and said:\n{output.decode()[-4000:]}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output.decode()
