"""Bytes that one rank asks another for while that does something else: threads answer there, no call of its own.

Everything else on the wire is met from both sides. Here a rank that is alone in what it does (it writes a file for all)
still gets what others have. The connections are plain sockets: messages of process groups must come in one order on all
ranks, and waiting for one that may never come would hold up leaving the group. Nothing is unpickled.

Whoever connects must show that it knows the listener's secret, and so must the listener; the secret itself is not sent.
Those that have not shown it yet are few at a time, each for a few seconds, and take no thread.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
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

from hetu_fx.base.addresses import LOOPBACK, socket_family
from hetu_fx.comm_ops.wire.flat import Flat
from hetu_fx.errors import CommError

Question = Mapping[str, Any]
"""What is asked: any JSON object."""
Answer = Callable[[Question], Tensor]
"""Gives the bytes (uint8, in host memory); what it raises is told to the rank that asked."""

CONNECT_SECONDS = 5.0
SHOW_SECONDS = 5.0
"""For which whoever has connected may take to show the secret."""
STALL_SECONDS = 60.0
"""For which a message that has begun may stand still."""
CLOSE_SECONDS = 2.0
"""For which a listener that is closed waits for the answers that are being given."""
RETRY_SECONDS = 0.1
"""After which a listener that had no file descriptor left tries again."""

MOST_STRANGERS = 32
"""Connections that have not shown the secret yet; another one takes the place of the oldest."""
MOST_QUESTION_BYTES = 1 << 20
MOST_REFUSAL_BYTES = 1 << 16

_WORD_BYTES = 32  # of the secret, of what each end draws, and of what shows that it knows the secret
_HEAD = struct.Struct("!?Q")  # whether it is an answer, not an error; and its bytes
_LENGTH = struct.Struct("!I")


class ReadRefusal(CommError):
    """The rank that was asked has said why it does not answer."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank answers.

    Attributes:
        host: the address that its listener is bound to.
        port: of its listener.
        secret: what whoever asks must know.
    """

    host: str
    port: int
    secret: bytes


class Listener:
    """Answers questions, each connection in a thread of its own, until it is closed. The threads keep nothing alive.

    Close it before the process ends: a thread that comes back from torch to an interpreter that is being finalised is
    ended in the middle of a destructor, which aborts the process.

    Args:
        answer: called in those threads.
        host: the one address of this machine at which it listens.
        most: connections that have shown the secret; more are closed.
    """

    def __init__(self, answer: Answer, host: str = LOOPBACK, most: int = 64) -> None:
        self._answer, self._most = answer, most
        self._socket = socket.create_server((host, 0), family=socket_family(host), backlog=128)
        self._socket.setblocking(False)
        secret = secrets.token_bytes(_WORD_BYTES)
        self.address = Address(host, self._socket.getsockname()[1], secret)
        self._open: set[socket.socket] = set()
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._closed = threading.Event()
        self._lock = threading.Lock()  # a connection is taken, with its thread started, before it is closed, or not
        self._start(self._listen)

    def close(self) -> None:
        """Answer no more; whoever waits for an answer gets an error. Waits for its other threads for a bounded time."""
        with self._lock:
            self._closed.set()
            for connection in (self._socket, *self._open):  # each is closed by its own thread, which this wakes
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            threads = set(self._threads) - {threading.current_thread()}
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="hetu_fx answers", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _listen(self) -> None:
        """Take connections, and give a thread to those that show the secret."""
        with self._socket, _Strangers(self.address.secret) as strangers:
            strangers.selector.register(self._socket, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in strangers.selector.select(strangers.seconds_left()):
                    if key.data is not None:
                        if strangers.hear(key.data):
                            self._welcome(key.data.connection)
                    elif not self._closed.is_set():
                        self._take(strangers)
                strangers.drop_late()

    def _take(self, strangers: _Strangers) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError:  # no file descriptor is left, or no memory: strangers give theirs up
            strangers.drop_all()
            self._closed.wait(RETRY_SECONDS)
            return
        strangers.admit(connection)

    def _welcome(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed.is_set() or len(self._open) >= self._most:
                connection.close()
                return
            self._open.add(connection)
            try:
                self._start(self._serve, connection)
            except RuntimeError:  # the system has no thread left; who asks hears that the connection was closed
                self._open.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError), connection:
            _prepare(connection)
            while True:
                is_answer, told = self._answered(_question(connection))
                _send(connection, _HEAD.pack(is_answer, len(told)))
                _send(connection, told)
        with self._lock:
            self._open.discard(connection)

    def _answered(self, text: bytes) -> tuple[bool, memoryview | bytes]:
        try:
            return True, _memory(self._answer(json.loads(text)))
        except Exception as error:  # whatever it is, the rank that asked must not wait
            return False, f"{type(error).__name__}: {error}".encode()[:MOST_REFUSAL_BYTES]


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection that has not shown the secret; `words` is what was sent to it, `shown` what has come."""

    connection: socket.socket
    deadline: float
    words: bytes
    shown: bytes = b""


class _Strangers:
    """Connections that have not shown the secret yet, served by one thread; the last are closed at the end."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._here: list[_Stranger] = []  # the oldest first
        self.selector = selectors.PollSelector()

    def __enter__(self) -> _Strangers:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop_all()
        self.selector.close()

    def seconds_left(self) -> float | None:
        """Return after how many seconds one is to be dropped; None if nobody is here."""
        return max(0.0, self._here[0].deadline - time.monotonic()) if self._here else None

    def admit(self, connection: socket.socket) -> None:
        """Give a connection its few seconds; the oldest makes room."""
        if len(self._here) >= MOST_STRANGERS:
            self._drop(self._here[0])
        stranger = _Stranger(connection, time.monotonic() + SHOW_SECONDS, secrets.token_bytes(_WORD_BYTES))
        self._here.append(stranger)
        connection.setblocking(False)
        self.selector.register(connection, selectors.EVENT_READ, stranger)
        try:
            connection.sendall(stranger.words)
        except OSError:
            self._drop(stranger)

    def hear(self, stranger: _Stranger) -> bool:
        """Take in what one has sent; returns whether it has shown the secret, and is a stranger no more."""
        if stranger not in self._here:  # it has made room meanwhile
            return False
        try:
            got = stranger.connection.recv(2 * _WORD_BYTES - len(stranger.shown))
            stranger.shown += got
            if got and len(stranger.shown) < 2 * _WORD_BYTES:
                return False
            word, proof = stranger.shown[:_WORD_BYTES], stranger.shown[_WORD_BYTES:]
            if got and hmac.compare_digest(proof, _proof(self._secret, b"asks", stranger.words, word)):
                stranger.connection.sendall(_proof(self._secret, b"answers", word, stranger.words))
                self._forget(stranger)
                return True
        except BlockingIOError:
            return False
        except OSError:  # it has gone
            pass
        self._drop(stranger)
        return False

    def drop_late(self) -> None:
        """Close those whose time is over."""
        while self._here and self._here[0].deadline <= time.monotonic():
            self._drop(self._here[0])

    def drop_all(self) -> None:
        """Close all."""
        while self._here:
            self._drop(self._here[0])

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._here.remove(stranger)
        self.selector.unregister(stranger.connection)


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
                if is_answer and size == expected:
                    if into is not None:
                        _receive_into(connection, _memory(into))
                    return
                if is_answer:
                    self._drop(rank)  # nobody reads that
                    raise ReadRefusal(f"rank {rank} answers {size} bytes instead of {expected}")
                if size > MOST_REFUSAL_BYTES:
                    raise EOFError(f"its reason has {size} bytes")
                told = bytes(_received(connection, size)).decode(errors="replace")
            except (OSError, EOFError) as error:
                self._drop(rank)
                where = f"{self._addresses[rank].host} port {self._addresses[rank].port}"
                raise CommError(
                    f"rank {rank} does not answer: {error}; it has ended, is stopped, or cannot be reached at {where}"
                ) from error
        raise ReadRefusal(f"rank {rank}: {told}")

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
    connection = socket.create_connection((address.host, address.port), timeout=CONNECT_SECONDS)
    try:
        _prepare(connection)
        connection.settimeout(CONNECT_SECONDS)
        theirs, word = bytes(_received(connection, _WORD_BYTES)), secrets.token_bytes(_WORD_BYTES)
        connection.sendall(word + _proof(address.secret, b"asks", theirs, word))
        shown = bytes(_received(connection, _WORD_BYTES))
        if not hmac.compare_digest(shown, _proof(address.secret, b"answers", word, theirs)):
            raise EOFError("it does not know the secret")
    except (OSError, EOFError) as error:
        connection.close()
        raise ConnectionError(f"{address.host} port {address.port} is not that rank: {error}") from error
    return connection


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """Return what only one that knows the secret can say about two words, one of which the other end has drawn."""
    return hmac.digest(secret, role + first + second, "sha256")


def _prepare(connection: socket.socket) -> None:
    """Let a connection wait for its other end, send at once, and notice after a few minutes that a machine is gone."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 8)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _question(connection: socket.socket) -> bytes:
    """Wait for the next question, however long it takes to begin."""
    connection.settimeout(None)
    first = bytes(_received(connection, 1))
    connection.settimeout(STALL_SECONDS)
    (length,) = _LENGTH.unpack(first + _received(connection, _LENGTH.size - 1))
    if length > MOST_QUESTION_BYTES:
        raise EOFError(f"a question has {length} bytes")
    return bytes(_received(connection, length))


def _send(connection: socket.socket, told: memoryview | bytes) -> None:
    """Send all, while each next bit of it goes out in time."""
    left = memoryview(told)
    while left:
        left = left[connection.send(left) :]


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
