"""The store in which the workers of one start meet: a process of its own, so that no worker takes it along.

Who connects to a store that is gone tries for minutes, and cannot be told to leave off (torch 2.13).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import NoReturn

from hetu_fx.base.torch_private import TCPStore

SECONDS = 300.0


class StoreProcess:
    """A process that serves a new store on `port` of this machine until `end`, or until its parent is gone.

    It leaves go of `others`, file descriptors that are the parent's alone.
    """

    def __init__(self, others: Iterable[int] = ()) -> None:
        self.channel, there = socket.socketpair()
        self.process = os.fork()
        if not self.process:
            self.channel.close()
            _serve(there, others)
        there.close()
        self.port = int(self.channel.recv(16))

    def end(self) -> None:
        """Stop serving; whoever waits for a key gets an error."""
        self.channel.close()
        os.waitpid(self.process, 0)


def _serve(channel: socket.socket, others: Iterable[int]) -> NoReturn:
    try:
        for descriptor in others:
            os.close(descriptor)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
        channel.send(str(store.port).encode())
        channel.recv(1)
    finally:
        os._exit(0)
