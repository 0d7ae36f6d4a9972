"""What the ranks of one run read of each other's home tensors while only one of them asks.

A rank that saves for all, as `if rank == 0: torch.save(model.state_dict(), ...)`, gets the others' pieces from threads
there. A tensor is known by its name: of a parameter, of a parameter and what an optimizer keeps of it, or of what it is
a copy of; others have none, and are read where all ranks ask. Values are those of the program's place: home tensors
count their writes, which every rank makes alike. Whoever is asked waits until it has made as many as the rank that
asks, and refuses if it has made more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from weakref import WeakMethod, finalize, ref

import torch
from torch import nn

from hetu_fx.annotations.local import index
from hetu_fx.base.addresses import Contact, addresses_of
from hetu_fx.base.per_rank import PerRank
from hetu_fx.base.torch_private import version
from hetu_fx.comm_ops.wire.consensus import of_all, together
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.one_sided import Caller, Listener, Question, Refused
from hetu_fx.comm_ops.wire.shutdown import finish_at_exit
from hetu_fx.errors import CommError, StateError
from hetu_fx.switching.home.held import COPIED, JOINT, Key, Readable, Readings, is_copy, part_of, source_of, why_not
from hetu_fx.switching.home.journal import journal
from hetu_fx.switching.home.memory import let_go_of_wholes
from hetu_fx.switching.home.stepped import numbered
from hetu_fx.switching.home.tensor import OPS, HomeTensor, gather_whole

_PAUSE_SECONDS = 0.005
_MARGIN_SECONDS = 10.0  # who is asked tells why it does not answer before who asks gives up
_LEAVING = "is leaving"
_LEAVING_SECONDS = 2.0
_USEFUL_SECONDS = 60.0  # for which a rank that leaves waits for the next question


class Names:
    """Names of the home tensors of one run, the same on all ranks.

    Args:
        homes: the home parameters by name.
    """

    def __init__(self, homes: Mapping[str, nn.Parameter]) -> None:
        self.homes = {name: _home(parameter) for name, parameter in homes.items()}
        self._parameters = dict(homes)
        self._index: dict[int, tuple[Key, HomeTensor]] = {}
        self._swaps = -1  # before the index was made

    def name_of(self, piece: torch.Tensor) -> Key | None:
        """Return the key of the parameter, or the optimizer's state, whose piece this is; None if it is of none."""
        for is_new in (False, True):
            if is_new or self._swaps != journal().swaps:
                self._swaps = journal().swaps
                self._index = {id(tensor.local): (key, tensor) for key, tensor in self._named()}
            found = self._index.get(id(piece))
            if found is not None and found[1].local is piece:
                return found[0]
            if (
                journal().copy_at(piece) is not None
            ):  # not what the index has missed, most likely: there are many of them
                return None
        return None

    def copy_name_of(self, piece: torch.Tensor) -> Key | None:
        """Return the key of a copy of something with a name; None if it is none, or one of several."""
        key = self._copy_key(piece)
        if key is None or version(piece) == 0:
            return key
        alike = [held for held in self.held(key) if held.writes == version(piece)]
        return key if len(alike) == 1 else None

    def _copy_key(self, piece: torch.Tensor) -> Key | None:
        copied = journal().copy_at(piece)
        source = None if copied is None else copied.source()
        if copied is None or source is None:
            return None
        origin = self.name_of(source) or self._copy_key(source)
        return None if origin is None else (*origin, COPIED, str(copied.writes), str(piece.dtype))

    def held(self, key: Key) -> list[Readable]:
        """Return what this rank holds under a key: several, if it is one of copies."""
        if key[0] == JOINT:
            return []
        if is_copy(key):
            alike = [(p, its) for p, its in journal().copies() if (str(its.writes), str(p.dtype)) == key[-2:]]
            return [Readable(piece, piece, its.layout) for piece, its in alike if self._copy_key(piece) == key]
        if len(key) == 1:
            return [Readable.home(self.homes[key[0]])]
        name, number, state = key
        found = [one.state.get(self._parameters[name], {}).get(state) for one, its in numbered() if its == int(number)]
        return [Readable.home(tensor) for tensor in found if isinstance(tensor, HomeTensor)]

    def _named(self) -> Iterator[tuple[Key, HomeTensor]]:
        for name, home in self.homes.items():
            yield (name,), home
            for optimizer, number in numbered():
                for key, value in list(optimizer.state.get(self._parameters[name], {}).items()):  # threads ask too
                    if isinstance(value, HomeTensor):
                        yield (name, str(number), str(key)), value


def _home(parameter: nn.Parameter) -> HomeTensor:
    assert isinstance(parameter, HomeTensor)
    return parameter


class SharedHomes:
    """The home tensors of one run, for its ranks to read of each other. Made by all ranks together.

    Args:
        table: the ranks.
        homes: the home parameters by name.
        seconds: how long a rank waits for another; not longer than messages of the table do.
    """

    def __init__(self, table: GroupTable, homes: Mapping[str, nn.Parameter], seconds: float) -> None:
        self.rank, self.size = table.rank, table.size
        self.seconds = min(seconds, table.timeout.total_seconds())
        self.know(homes)
        self._read = Readings()
        self._joint = 0  # readings by all ranks so far
        self._is_leaving = False
        self._asked_at = time.monotonic()
        if not table.is_of_processes:
            return  # nobody answers for another: whoever reads a whole has all ranks take part
        runs = _runs()
        runs.append(ref(self, runs.remove))
        if self.size > 1:
            host = addresses_of(of_all(table, together(table, Contact.own)))[self.rank]
            self._listener = Listener(_weakly(self._answer), host, most=2 * self.size)
            finalize(self, self._listener.close)
            self._caller = Caller(of_all(table, self._listener.address), self.seconds + _MARGIN_SECONDS)
            finish_at_exit(self)

    def know(self, homes: Mapping[str, nn.Parameter]) -> None:
        """Take these as the run's home parameters from now on; between the same steps on all ranks."""
        self.names = Names(homes if self.size > 1 else {})

    def whole(self, home: HomeTensor, key: Key | None) -> torch.Tensor:
        """Return the whole of a tensor; without a key all ranks must ask.

        Raises:
            StateError: another rank has gone on and written it, or does not ask too for a tensor without a name.
            CommError: another rank has ended, or cannot be reached.
        """
        asked = key or (JOINT, str(self._joint), str(tuple(home.shape)), str(home.dtype))
        now = 0 if key is None else version(home.local) if is_copy(key) else self.names.held(key)[0].writes
        part = part_of(home.local, home.home_layout)
        self._read.keep(asked, now, part.clone())
        question = {"key": asked, "version": now, "layout": str(home.home_layout.annotation), "rank": self.rank}
        whole = self._gathered(home, part, question)
        self._joint += key is None
        return whole

    def forget(self) -> None:
        """Let go of what was kept for ranks that read later: all have come so far that they have read it."""
        self._read.clear()
        let_go_of_wholes()

    def finish(self) -> None:
        """Answer the others until they leave too, or have asked nothing for long; when the process ends."""
        if not self._is_leaving:
            for run in _all_runs():  # at once: ranks finish them in orders of their own
                run._leave()
        if any(home.home_layout.counted_chunks for home in self.names.homes.values()):
            for rank in range(self.size):
                self._wait_for(rank)
        self._caller.close()
        self._listener.close()

    def _leave(self) -> None:
        self._is_leaving = True
        self._asked_at = time.monotonic()

    def _wait_for(self, rank: int) -> None:
        has_left = torch.tensor([rank == self.rank], dtype=torch.uint8)
        with suppress(CommError):  # it has ended
            while not has_left and time.monotonic() < self._asked_at + min(self.seconds, _USEFUL_SECONDS):
                self._caller.ask(rank, {"key": [_LEAVING]}, has_left)

    def _gathered(self, home: HomeTensor, own: torch.Tensor, question: Question) -> torch.Tensor:
        whole = own.new_empty(home.home_layout.shape)
        for rank, owner in enumerate(home.home_layout.others):
            sizes = [box.numel for box, _ in owner.counted_chunks]
            if not sizes:
                continue
            part = own if rank == self.rank else own.new_empty(sum(sizes))
            if rank != self.rank:
                self._ask(rank, question, part)
            for (box, _), values in zip(owner.counted_chunks, part.split(sizes), strict=True):
                target = whole[index(box)]
                target.copy_(values.view(target.shape))
        return whole.to(home.device)

    def _ask(self, rank: int, question: Question, into: torch.Tensor) -> None:
        try:
            self._caller.ask(rank, question, into)
        except Refused as error:
            raise StateError(f"rank {rank} does not give its part: {error}") from None

    def _answer(self, question: Question) -> torch.Tensor:
        """Answer another rank, in a thread."""
        key = tuple(question["key"])
        if key == (_LEAVING,):
            return self._left()
        try:
            return self._part_at(key, question).view(torch.uint8)
        finally:
            self._asked_at = time.monotonic()

    def _left(self) -> torch.Tensor:
        """Tell whether this rank leaves too, after a short while if it does not yet."""
        deadline = time.monotonic() + min(_LEAVING_SECONDS, self.seconds)
        while not self._is_leaving and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        return torch.tensor([self._is_leaving], dtype=torch.uint8)

    def _part_at(self, key: Key, question: Question) -> torch.Tensor:
        """Return this rank's part of a tensor, once it has been written as often as on the rank that asks."""
        wanted, deadline = question["version"], time.monotonic() + self.seconds
        while True:
            held = self.names.held(key)
            # Seen before it is looked for: what this rank has read itself was kept before it went on.
            is_beyond = bool(held) and all(one.writes > wanted for one in held)
            part = self._part_now(key, held, question)
            if part is not None:
                return part
            if is_beyond or time.monotonic() > deadline:
                raise StateError(why_not(key, held, question, self.seconds))
            time.sleep(_PAUSE_SECONDS)

    def _part_now(self, key: Key, held: Sequence[Readable], question: Question) -> torch.Tensor | None:
        """Return the part if it is here now; of a copy that nobody has written since also that of its source."""
        wanted = question["version"]
        read = self._read.part(key, wanted)
        if read is not None:
            return read
        parts = [part for one in held if (part := one.part(wanted, question["layout"])) is not None]
        if len(parts) == 1 or (parts and not wanted):
            return parts[0]
        if parts:
            raise StateError(why_not(key, held, question, self.seconds))
        if not is_copy(key) or wanted:
            return None
        source, writes, dtype = source_of(key)
        part = self._part_now(source, self.names.held(source), {**question, "version": writes})
        return None if part is None else part.to(dtype)


_runs: PerRank[list[ref[SharedHomes]]] = PerRank(list)


def _all_runs() -> list[SharedHomes]:
    return [run for run in (reference() for reference in _runs()) if run is not None]


def _weakly(method: Callable[[Question], torch.Tensor]) -> Callable[[Question], torch.Tensor]:
    """Return a method that keeps its object no longer than others do: threads that answer keep no model alive."""
    held = WeakMethod(method)

    def answer(question: Question) -> torch.Tensor:
        found = held()
        if found is None:
            raise StateError("the model is no longer there")
        return found(question)

    return answer


def _read_whole(home: HomeTensor) -> torch.Tensor:
    """Return the whole of a home tensor: of the run that knows its name, else of the newest, where all ranks ask."""
    runs = _all_runs()
    for find in (Names.name_of, Names.copy_name_of):
        for run in runs:
            key = find(run.names, home.local)
            if key is not None:
                return run.whole(home, key)
    return runs[-1].whole(home, None) if runs else gather_whole([home])[0]


OPS.read_whole = _read_whole  # type: ignore[method-assign]
