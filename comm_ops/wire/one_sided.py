"""Bytes that one rank asks another for while that does something else: threads answer there, no call of its own.

Everything else on the wire is met from both sides. Here a rank that is alone in what it does (it writes a file for all)
still gets what others have. The connections are plain sockets: messages of process groups must come in one order on all
ranks, and waiting for one that may never come would hold up leaving the group. Nothing is unpickled, and who does not
know the listener's secret is not answered.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import Tensor

from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.errors import CommError

Question = Mapping[str, Any]
"""What is asked: any JSON object."""
Answer = Callable[[Question], Tensor]
"""Gives the bytes (uint8, in host memory); what it raises is told to the rank that asked."""

CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 2.0
"""For which a listener that is closed waits for the answers that are being given."""

_SECRET_BYTES = 32
_HEAD = struct.Struct("!?Q")  # whether it is an answer, not an error; and its bytes
_LENGTH = struct.Struct("!I")
_WELCOME = b"\x01"


class Refused(CommError):
    """The rank that was asked has said why it does not answer."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank answers.

    Attributes:
        hosts: names or numbers of its machine, the likeliest first.
        port: of its listener.
        secret: what whoever asks must know.
    """

    hosts: tuple[str, ...]
    port: int
    secret: bytes


class Listener:
    """Answers questions, each connection in a thread of its own, until it is closed. The threads keep nothing alive.

    Close it before the process ends: a thread that comes back from torch to an interpreter that is being finalised is
    ended in the middle of a destructor, which aborts the process.

    Args:
        answer: called in those threads.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._socket = socket.create_server(("", 0), backlog=128)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._open: list[socket.socket] = []
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._is_closed = False
        self._lock = threading.Lock()  # a connection is taken, with its thread started, before it is closed, or not
        self._start(self._accept)

    @property
    def address(self) -> Address:
        """Where it is to be asked."""
        return Address(_hosts(), self._socket.getsockname()[1], self._secret)

    def close(self) -> None:
        """Answer no more; whoever waits for an answer gets an error. Waits for its other threads for a bounded time."""
        with self._lock:
            self._is_closed = True
            for connection in (self._socket, *self._open):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            threads = set(self._threads) - {threading.current_thread()}
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="hetu_fx answers", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._open.append(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(bytes(_received(connection, _SECRET_BYTES)), self._secret):
                return
            connection.sendall(_WELCOME)
            while True:
                (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
                question = json.loads(bytes(_received(connection, length)))
                is_answer, told = self._answered(question)
                connection.sendall(_HEAD.pack(is_answer, len(told)))
                connection.sendall(told)
        with suppress(ValueError):
            self._open.remove(connection)

    def _answered(self, question: Question) -> tuple[bool, memoryview | bytes]:
        try:
            told = self._answer(question)
        except Exception as error:  # whatever it is, the rank that asked must not wait
            return False, f"{type(error).__name__}: {error}".encode()
        return True, _memory(told)


class Caller:
    """Asks the other ranks, over one connection to each, which is kept; one question at a time.

    Args:
        addresses: by rank.
        seconds: how long an answer may take.
    """

    def __init__(self, addresses: Sequence[Address], seconds: float) -> None:
        self._addresses, self._seconds = addresses, seconds
        self._open: dict[int, socket.socket] = {}
        self._lock = threading.Lock()  # whoever asks may be any thread

    def ask(self, rank: int, question: Question, into: Tensor | None = None) -> None:
        """Ask a rank, and put the bytes that it answers into a tensor in host memory.

        Raises:
            Refused: it does not answer, and says why; or it answers something of another size.
            CommError: it has ended, cannot be reached, or has not answered in time.
        """
        text = json.dumps(question).encode()
        with self._lock:
            try:
                connection = self._connected(rank)
                connection.sendall(_LENGTH.pack(len(text)) + text)
                is_answer, size = _HEAD.unpack(_received(connection, _HEAD.size))
                expected = 0 if into is None else into.numel() * into.itemsize
                if is_answer and into is not None and size == expected:
                    _receive_into(connection, _memory(into))
                    return
                told = bytes(_received(connection, size))
            except (OSError, EOFError) as error:
                self._drop(rank)
                where = f"{', '.join(self._addresses[rank].hosts)} port {self._addresses[rank].port}"
                raise CommError(
                    f"rank {rank} does not answer: {error}; it has ended, is stopped, or cannot be reached at {where}"
                ) from error
        if not is_answer:
            raise Refused(f"rank {rank}: {told.decode()}")
        if size != expected:
            raise Refused(f"rank {rank} answers {size} bytes instead of {expected}")

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for rank in tuple(self._open):
                self._drop(rank)

    def _drop(self, rank: int) -> None:
        connection = self._open.pop(rank, None)
        if connection is not None:
            connection.close()

    def _connected(self, rank: int) -> socket.socket:
        if rank not in self._open:
            self._open[rank] = _connect(self._addresses[rank])
            self._open[rank].settimeout(self._seconds)
        return self._open[rank]


def _connect(address: Address) -> socket.socket:
    failed: OSError = ConnectionError("no address is known")
    for host in address.hosts:
        try:
            connection = socket.create_connection((host, address.port), timeout=CONNECT_SECONDS)
        except OSError as error:
            failed = error
            continue
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(address.secret)
            _received(connection, len(_WELCOME))  # or it is another machine's, of the same name from here
            return connection
        except (OSError, EOFError) as error:
            failed = ConnectionError(f"{host} port {address.port} is not that rank: {error}")
            connection.close()
    raise failed


def _memory(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense tensor in host memory, where they are."""
    array: Any = Flat.over(tensor).as_bytes().numpy()
    return memoryview(array)


def _received(connection: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    _receive_into(connection, memoryview(found))
    return found


def _receive_into(connection: socket.socket, room: memoryview) -> None:
    done = 0
    while done < len(room):
        count = connection.recv_into(room[done:])
        if count == 0:
            raise EOFError("the connection was closed")
        done += count


def _hosts() -> tuple[str, ...]:
    """Return what this machine may be reached by: the end of the way to the first rank's machine, and its name."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        found.append(way.getsockname()[0])
    return tuple(dict.fromkeys([*found, socket.gethostname(), "127.0.0.1"]))
