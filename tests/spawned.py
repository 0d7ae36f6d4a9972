"""Runs a function in several processes at once and collects what each has to say."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def results_of(work: Callable[..., None], world: int, *arguments: Any, seconds: float) -> dict[int, Any]:
    """Call work(rank, *arguments, results) in `world` processes, each of which puts (rank, result); leave none behind.

    Raises `queue.Empty` if a process says nothing for so many seconds.
    """
    context = multiprocessing.get_context("spawn")
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
