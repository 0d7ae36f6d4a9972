"""A process that was forked from one that has computed has one thread, and no CUDA."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest
import torch

from hetu_fx.base import forked
from hetu_fx.errors import EnvironmentProblem


def told(kind: str, work: Callable[..., None]) -> object:
    """Return what a process of this start method has put."""
    context = multiprocessing.get_context(kind)
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(60)
        return ours.recv()
    finally:
        process.kill()
        process.join()


def threads_after(connection: object) -> None:
    torch.set_num_threads(2)
    forked.settle_after_fork()
    connection.send(torch.get_num_threads())  # type: ignore[attr-defined]


def yes() -> bool:
    return True


def looked_for_cuda(connection: object) -> None:
    torch.cuda._is_in_bad_fork = yes
    threads_after(connection)


def refusal(connection: object) -> None:
    torch.cuda._is_in_bad_fork = torch.cuda.is_available = yes
    try:
        forked.settle_after_fork()
    except EnvironmentProblem as error:
        connection.send(str(error))  # type: ignore[attr-defined]


def test_a_forked_process_has_one_thread() -> None:
    assert told("fork", threads_after) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_fork_of_a_process_that_found_no_cuda_device_is_not_refused() -> None:
    assert told("fork", looked_for_cuda) == 1


def test_this_process_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "in_bad_fork", lambda: True)
    before = torch.get_num_threads()
    forked.settle_after_fork()
    assert torch.get_num_threads() == before


def test_a_fork_of_a_notebook_that_has_used_cuda_is_refused() -> None:
    assert "restart the notebook" in str(told("fork", refusal))
