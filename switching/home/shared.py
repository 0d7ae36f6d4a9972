"""What the ranks of one run read of each other's home tensors while only one of them asks.

A rank that saves for all, as `if rank == 0: torch.save(model.state_dict(), ...)`, gets the others' pieces from threads
there. A tensor is known by its name: of a parameter, or of a parameter and what an optimizer keeps of it; others have
none, and are read where all ranks ask. Values are those of the program's place: home tensors count their writes, which
every rank makes alike. Whoever is asked waits until it has made as many as the rank that asks, and refuses if it has
made more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from weakref import WeakKeyDictionary, WeakMethod, finalize, ref

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from hetu_fx.annotations.local import index
from hetu_fx.base.torch_private import version
from hetu_fx.comm_ops.wire.consensus import of_all
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.one_sided import Caller, Listener, Question, Refused
from hetu_fx.comm_ops.wire.shutdown import finish_at_exit
from hetu_fx.errors import CommError, StateError
from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.home.memory import let_go_of_wholes
from hetu_fx.switching.home.tensor import READ_WHOLE, HomeTensor, gather_whole, undisturbed

_PAUSE_SECONDS = 0.002
_MARGIN_SECONDS = 10.0  # who is asked tells why it does not answer before who asks gives up
_LEAVING = "is leaving"
_JOINT = "read by all ranks"

Key = tuple[str, ...]
"""A parameter's name; that, an optimizer's number and a key of its state; or what tells readings by all ranks apart."""


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
        self._index: dict[int, tuple[Key, HomeTensor]] = {}
        self.know(homes)
        self._read: dict[Key, tuple[int, torch.Tensor]] = {}  # this rank's part of what it has read itself
        self._joint = 0  # readings by all ranks so far
        self._is_leaving = False
        self._asked_at = time.monotonic()
        _runs.append(ref(self))
        if self.size > 1:
            listener = Listener(_weakly(self._answer))
            finalize(self, listener.close)
            self._caller = Caller(of_all(table, listener.address), self.seconds + _MARGIN_SECONDS)
            finish_at_exit(self)

    def know(self, homes: Mapping[str, nn.Parameter]) -> None:
        """Take these as the run's home parameters from now on; between the same steps on all ranks."""
        self.homes = {name: _home(parameter) for name, parameter in homes.items()}
        self._parameters = dict(homes)
        self._index = {}

    def key_of(self, home: HomeTensor) -> Key | None:
        """Return the key of the tensor whose piece `home` shares, if it has a name."""
        piece = home.local
        for is_new in (False, True):
            if is_new:
                self._index = {id(tensor.local): (key, tensor) for key, tensor in self._named()}
            found = self._index.get(id(piece))
            if found is not None and found[1].local is piece:
                return found[0]
        return None

    def whole(self, home: HomeTensor, key: Key | None) -> torch.Tensor:
        """Return the whole of a tensor; without a key all ranks must ask.

        Raises:
            StateError: another rank has gone on and written it, or does not ask too for a tensor without a name.
            CommError: another rank has ended, or cannot be reached.
        """
        named = None if key is None else self._tensor(key)
        asked = key or (_JOINT, str(self._joint), str(tuple(home.shape)), str(home.dtype))
        now = 0 if named is None else version(named)
        part = _part(home.local, home.home_layout)
        self._read[asked] = (now, part.clone())
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
        self._is_leaving = True
        if any(home.home_layout.counted_chunks for home in self.homes.values()):
            for rank in range(self.size):
                with suppress(CommError):  # it has ended
                    if rank != self.rank:
                        self._caller.ask(rank, {"key": [_LEAVING]})
        self._caller.close()

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
        self._asked_at = time.monotonic()
        try:
            key = tuple(question["key"])
            return self._left() if key == (_LEAVING,) else self._part_at(key, question)
        finally:
            self._asked_at = time.monotonic()

    def _left(self) -> torch.Tensor:
        """Wait until this rank leaves too; not longer than it is of use."""
        while not self._is_leaving and time.monotonic() < self._asked_at + self.seconds:
            time.sleep(_PAUSE_SECONDS)
        return torch.empty(0, dtype=torch.uint8)

    def _part_at(self, key: Key, question: Question) -> torch.Tensor:
        """Return this rank's part of a tensor as bytes, once it has been written as often as on the rank that asks."""
        wanted, deadline = question["version"], time.monotonic() + self.seconds
        while True:
            read = self._read.get(key)
            if read is not None and read[0] == wanted:
                return _as_bytes(read[1])
            tensor = None if key[0] == _JOINT else self._tensor(key)
            part = None if tensor is None else _part_after(tensor, wanted, question["layout"])
            if part is not None:
                return _as_bytes(part)
            is_late = time.monotonic() > deadline
            if is_late or (tensor is not None and version(tensor) > wanted):
                raise StateError(_reason(key, tensor, question, self.seconds))
            time.sleep(_PAUSE_SECONDS)

    def _tensor(self, key: Key) -> HomeTensor | None:
        if len(key) == 1:
            return self.homes[key[0]]
        name, number, state = key
        parameter = self._parameters[name]
        optimizer = next((one for one, its in tuple(_seen.items()) if its == int(number)), None)
        return None if optimizer is None else optimizer.state.get(parameter, {}).get(state)

    def _named(self) -> Iterator[tuple[Key, HomeTensor]]:
        for name, home in self.homes.items():
            yield (name,), home
            for optimizer, number in tuple(_seen.items()):
                for key, value in optimizer.state.get(self._parameters[name], {}).items():
                    if isinstance(value, HomeTensor):
                        yield (name, str(number), str(key)), value


_runs: list[ref[SharedHomes]] = []
_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # by number, in the order of their first steps
_numbers = count()


def remember(optimizer: Optimizer, *_: object) -> None:
    """Know what an optimizer keeps from now on, under the same number on all ranks."""
    if optimizer not in _seen:
        _seen[optimizer] = next(_numbers)


def _home(parameter: nn.Parameter) -> HomeTensor:
    assert isinstance(parameter, HomeTensor)
    return parameter


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
    runs = [run for run in (reference() for reference in _runs) if run is not None]
    for run in runs:
        key = run.key_of(home)
        if key is not None:
            return run.whole(home, key)
    return runs[-1].whole(home, None) if runs else gather_whole([home])[0]


def _part(local: torch.Tensor, layout: HomeLayout) -> torch.Tensor:
    """Return the elements that this rank counts in host memory, in the order of its chunks."""
    pieces = [local[index(place)].reshape(-1) for _, place in layout.counted_chunks]
    return torch.cat(pieces).cpu() if pieces else local.new_empty(0, device="cpu")


def _as_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.view(torch.uint8)


def _part_after(tensor: HomeTensor, wanted: int, layout: str) -> torch.Tensor | None:
    """Return this rank's part after so many writes; None if it has another value, or is on its way between homes."""
    if version(tensor) != wanted or "local" not in tensor.__dict__:
        return None
    if str(tensor.home_layout.annotation) != layout:
        raise StateError(f"it lies as {tensor.home_layout.annotation} there, as {layout} where it is asked for")
    part = undisturbed(lambda: _part(tensor.local, tensor.home_layout))
    return part if version(tensor) == wanted else None


def _reason(key: Key, tensor: HomeTensor | None, question: Question, seconds: float) -> str:
    asker, wanted = question["rank"], question["version"]
    way_out = "call full_tensor(), or model.hetu.save(folder), on every rank"
    if key[0] == _JOINT:
        return (
            f"rank {asker} reads a tensor of shape {key[2]} that is neither a parameter nor an optimizer's state (a "
            f"gradient, a copy), and this rank has not read it too within {seconds:g} s; {way_out}"
        )
    what = f"parameter {key[0]!r}" if len(key) == 1 else f"the optimizer's {key[2]!r} of {key[0]!r}"
    if tensor is None:
        return f"rank {asker} reads {what}, which is not there within {seconds:g} s; {way_out}"
    if version(tensor) > wanted:
        return (
            f"rank {asker} reads {what} as it was after {wanted} writes, and this rank has gone on and made "
            f"{version(tensor)}; read between optimizer.step() and the next call of the model, or {way_out}"
        )
    return (
        f"rank {asker} reads {what} after {wanted} writes, and this rank has made {version(tensor)} in {seconds:g} s; "
        f"make the same writes on all ranks, or {way_out}"
    )


register_optimizer_step_pre_hook(remember)
READ_WHOLE[:] = [_read_whole]
