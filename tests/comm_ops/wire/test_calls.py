"""What a process says of itself: its last call, and the user's line that it is at, found on the stack."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import ModuleType

import pytest
import torch

from hetu_fx.base import user_frames
from hetu_fx.comm_ops.wire import calls
from hetu_fx.comm_ops.wire.calls import LastCall, is_in_collective, note, user_line_of_error, whereabouts


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "last", LastCall())


def _seen_from_a_thread() -> calls.CallSite:
    found = []
    thread = threading.Thread(target=lambda: found.append(whereabouts()))
    thread.start()
    thread.join()
    return found[0]


def test_the_last_call_is_noted_with_the_users_line() -> None:
    note("model(...)", is_step=True)
    assert calls.last.text.startswith("model(...) at test_calls.py:")
    assert (calls.last.steps, calls.last.thread) == (1, threading.get_ident())


def test_a_thread_sees_the_line_that_the_user_is_at() -> None:
    found = _seen_from_a_thread()
    assert found.call == ""
    assert found.place.startswith("test_calls.py:")


def test_a_backward_that_runs_is_a_call_of_ours_at_the_line_that_asked_for_it() -> None:
    x = torch.ones(2, requires_grad=True)
    found = []
    x.register_hook(lambda gradient: found.append(_seen_from_a_thread()))
    x.sum().backward()
    assert found[0].call.startswith("_engine_run_backward")
    assert "(x.sum().backward())" in found[0].place


def test_an_errors_place_is_the_users_line_that_it_passed_last() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert user_line_of_error(caught.value).startswith("test_calls.py:")
    assert user_line_of_error(None) == ""


COLLECTIVES = torch.distributed.distributed_c10d.__file__
OURS = f"{user_frames.our_folders()[0]}/step.py"


@pytest.mark.parametrize(
    ("files", "is_in"),
    [
        ((COLLECTIVES, COLLECTIVES, "train.py"), True),
        ((COLLECTIVES, "accelerate.py", "train.py"), True),
        (("threading.py", "train.py", COLLECTIVES), False),
        ((COLLECTIVES, OURS, "train.py"), False),
        ((), False),
    ],
)
def test_a_collective_that_the_users_own_code_has_called_is_told_from_ours(
    files: tuple[str, ...], is_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_stack", lambda thread: [calls.Line(file, 1, "call") for file in files])
    assert is_in_collective() is is_in


class ImportsLate(ModuleType):
    """A module that imports another one when it is asked for what it does not have, as large packages do."""

    def __getattr__(self, name: str) -> object:
        sys.modules.setdefault(f"late_{len(sys.modules)}", ModuleType("late"))
        raise AttributeError(name)


def test_packages_that_import_their_parts_late_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imports_late", ImportsLate("imports_late"))
    before = set(sys.modules)
    user_frames.our_folders.cache_clear()  # packages of ours may have been imported since
    assert user_frames.our_folders.__wrapped__() == user_frames.our_folders()
    assert set(sys.modules) == before


def test_a_stack_is_read_while_its_frames_come_and_go_and_a_library_begins_threads() -> None:
    # With `faulthandler` in its place, this has ended the process within seconds on an idle machine.
    library = ctypes.CDLL(None)
    begin = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    over = threading.Event()

    def begin_threads() -> None:
        while not over.is_set():
            thread = ctypes.c_ulong()
            assert library.pthread_create(ctypes.byref(thread), None, begin, None) == 0
            assert library.pthread_join(thread, None) == 0

    def recurse(depth: int) -> int:
        return recurse(depth - 1) if depth else sum(x for x in range(3))

    def go_up_and_down() -> None:
        while not over.is_set():
            recurse(50)

    threads = [threading.Thread(target=work) for work in (begin_threads, go_up_and_down)]
    for thread in threads:
        thread.start()
    functions, looks = set[str](), 0
    while looks < 2000 or (looks < 1_000_000 and "recurse" not in functions):
        functions.update(line.function for line in calls._stack(threads[1].ident))
        looks += 1
    over.set()
    for thread in threads:
        thread.join(60)
    assert functions >= {"recurse", "go_up_and_down", "_bootstrap"}
    assert calls._stack(threads[1].ident) == []
