"""What the ranks of one run read of each other's home tensors while only one of them asks.

A rank that saves for all, as `if rank == 0: torch.save(model.state_dict(), ...)`, or that looks at one parameter, as
`if rank == 0: print(p.norm().item())`, gets the others' shares from threads there. A tensor is known by its name: of a
parameter, of a parameter and its gradient or what an optimizer keeps of it, or of what it is a copy of; others have
none, and are read where all ranks ask. What is computed of parameters and gradients by point-wise ops, and read as one
number, is computed there anew. Gradients stay readable until all ranks have come to the next call of the model.

Values are those of the program's place: home tensors count their writes, which every rank makes alike. A rank that is
asked waits until it has made as many as the rank that asks, and refuses if it has made more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakMethod, finalize, ref

import torch
from torch import Tensor, nn

from hetu_fx.annotations.local import index
from hetu_fx.base.addresses import Contact, rank_addresses
from hetu_fx.base.per_rank import own
from hetu_fx.base.torch_private import collectives_begun, version
from hetu_fx.comm_ops.wire.calls import is_in_collective
from hetu_fx.comm_ops.wire.consensus import all_gather_object, raise_on_all_ranks
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.comm_ops.wire.one_sided import Caller, Listener, Question, ReadRefusal
from hetu_fx.comm_ops.wire.process_group import world_group
from hetu_fx.comm_ops.wire.shutdown import finish_at_exit
from hetu_fx.errors import CommError, StateError
from hetu_fx.switching.home.held import JOINT, Key, Names, Readings, dtype_of, host_part, is_copy, why_not
from hetu_fx.switching.home.journal import journal
from hetu_fx.switching.home.memory import drop_cached_full_tensors
from hetu_fx.switching.home.ops import PARTS
from hetu_fx.switching.home.pointwise import CAST, is_pointwise
from hetu_fx.switching.home.tensor import MADE_OF, OPS, HomeTensor, LoneReads, Read, gather_whole, wrap

P = ParamSpec("P")
T = TypeVar("T")

_PAUSE_SECONDS = 0.005
_MARGIN_SECONDS = 10.0  # who is asked tells why it does not answer before who asks gives up
_MOST_CHARACTERS = 1000  # of an expression
_LEAVING = "is leaving"
_ELSEWHERE = "waits elsewhere"
_LEAVING_SECONDS = 2.0
_USEFUL_SECONDS = 60.0  # for which a rank that leaves waits for the next question


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
        self._table = table
        self.know(homes)
        self._read = Readings()
        self._joint = 0  # readings by all ranks so far
        self._is_leaving = False
        self._asked_at = time.monotonic()
        if not table.is_of_processes:
            return  # nobody answers for another: a rank that reads a whole has all ranks take part
        runs = _runs()
        runs.append(ref(self, runs.remove))
        if self.size > 1:
            host = rank_addresses(all_gather_object(table, raise_on_all_ranks(table, Contact.own)))[self.rank]
            self._listener = Listener(_weakly(self._answer), host, most=2 * self.size)
            finalize(self, self._listener.close)
            table.others_wait = _weakly(self.others_wait)
            self._caller = Caller(all_gather_object(table, self._listener.address), self.seconds + _MARGIN_SECONDS)
            finish_at_exit(self)

    def know(self, homes: Mapping[str, nn.Parameter]) -> None:
        """Take these as the run's home parameters from now on; between the same steps on all ranks."""
        self.names = Names(homes if self.size > 1 else {})

    def whole(self, home: HomeTensor, of: Any) -> Tensor:
        """Return the whole of a tensor that is an expression of what has names; None: all ranks must ask.

        Raises:
            StateError: another rank has gone on and written it, or does not ask too for a tensor without a name.
            CommError: another rank has ended, or cannot be reached.
        """
        own, layout = host_part(home.local, home.home_layout), home.home_layout
        joint = (JOINT, str(self._joint), str(tuple(home.shape)), str(home.dtype)), 0, str(layout.annotation)
        read = of or joint, None
        self._read.keep(read, own.clone())
        whole = own.new_empty(layout.shape)
        for rank, owner in enumerate(layout.others):
            sizes = [box.numel for box, _ in owner.counted_chunks]
            if not sizes:
                continue
            part = own if rank == self.rank else own.new_empty(sum(sizes))
            if rank != self.rank:
                self._ask(rank, [read], part)
            for (box, _), values in zip(owner.counted_chunks, part.split(sizes), strict=True):
                target = whole[index(box)]
                target.copy_(values.view(target.shape))
        self._joint += of is None
        return whole.to(home.device)

    def leaf(self, home: HomeTensor, key: Key) -> Any:
        """Return the expression of a tensor with a name, as it is now."""
        writes = version(home.local) if is_copy(key) else self.names.held(key)[0].writes
        return key, writes, str(home.home_layout.annotation)

    def is_now(self, of: Any) -> bool:
        """Tell whether what an expression reads has not been written since."""
        leaves = ((self.names.held(tuple(key)), writes) for key, writes, _ in _leaves(of))
        return all([one.writes for one in held] == [writes] for held, writes in leaves)

    def keep(self, read: Read, part: Tensor) -> None:
        """Keep this rank's part of a number, for ranks that read it later."""
        self._read.keep(read, part)

    def parts(self, reads: Sequence[Read], own: Tensor) -> Tensor:
        """Return all ranks' parts of numbers, a row for each rank, of which this one has `own`; as `whole` does."""
        found = own.cpu().repeat(self.size, 1)
        for rank in range(self.size):
            if rank != self.rank:
                self._ask(rank, reads, found[rank])
        return found.to(own.device)

    def others_wait(self) -> bool:
        """Tell whether each other rank is in a collective of torch's that this one has not begun, leaves, or has left.

        None of them comes to a call of the model before this rank has come there too.

        Raises:
            CommError: one has ended by an error, or cannot be reached.
        """
        begun, told = _begun_collectives(), torch.zeros(1, dtype=torch.uint8)
        for rank in range(self.size):
            if rank != self.rank:
                try:
                    self._caller.ask(rank, {_ELSEWHERE: begun}, told)
                except CommError:
                    if not self._has_left(rank):
                        raise
                    continue
                if not told:
                    return False
        return True

    def _has_left(self, rank: int) -> bool:
        """Tell whether a rank that does not answer has come to the end of its program."""
        path = self._table.path
        return path is not None and path.has_left(rank)

    def forget(self) -> None:
        """Let go of what was kept for ranks that read later: all have come so far that they have read it."""
        self._read.clear()
        self.names.forget_gradients()
        drop_cached_full_tensors(self.names.homes.values())

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
                self._caller.ask(rank, {_LEAVING: True}, has_left)

    def _ask(self, rank: int, reads: Sequence[Read], into: Tensor) -> None:
        try:
            self._caller.ask(rank, {"rank": self.rank, "reads": reads}, into)
        except ReadRefusal as error:
            raise StateError(f"rank {rank} does not give its part: {error}") from None
        except CommError as error:
            if not self._has_left(rank):
                raise
            raise StateError(
                f"rank {self.rank} needs rank {rank}'s shards of the model, but that has come to its end\n"
                f"hint: evaluate, save and read parameters before the other ranks end: hold them by "
                f"torch.distributed.barrier() after the last step"
            ) from error

    def _answer(self, question: Question) -> Tensor:
        """Answer another rank, in a thread."""
        if _LEAVING in question:
            return self._left()
        if _ELSEWHERE in question:
            is_in = is_in_collective() and _begun_collectives() > question[_ELSEWHERE]
            has_no_world = world_group() is None  # the script has destroyed it, and calls the model no more
            return torch.tensor([is_in or has_no_world or self._is_leaving], dtype=torch.uint8)
        try:
            parts = [self._part(read, question["rank"]) for read in question["reads"]]
            return torch.cat(parts).view(torch.uint8)
        finally:
            self._asked_at = time.monotonic()

    def _left(self) -> Tensor:
        """Tell whether this rank leaves too, after a short while if it does not yet."""
        deadline = time.monotonic() + min(_LEAVING_SECONDS, self.seconds)
        while not self._is_leaving and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
        return torch.tensor([self._is_leaving], dtype=torch.uint8)

    def _part(self, read: Read, asker: int) -> Tensor:
        """Return this rank's part, once all that it reads has been written as often as on the rank that asks."""
        deadline = time.monotonic() + self.seconds
        while True:
            # Seen before it is looked for: what this rank has read itself was kept before it went on.
            held = {tuple(key): (self.names.held(tuple(key)), writes) for key, writes, _ in _leaves(read[0])}
            beyond = [key for key, (those, n) in held.items() if those and all(one.writes > n for one in those)]
            part = self._read.part(read)
            part = journal().undisturbed(lambda: self._computed(read)) if part is None else part
            if part is not None:
                return part.cpu()
            if beyond or time.monotonic() > deadline:
                key = beyond[0] if beyond else next(iter(held))
                raise StateError(why_not(key, *held[key], asker, self.seconds))
            time.sleep(_PAUSE_SECONDS)

    def _computed(self, read: Read) -> Tensor | None:
        """Return this rank's part from what it holds; None if that is not what is asked for now."""
        of, reduced = read
        tensor = self._value(of)
        if tensor is None:
            return None
        part = (
            host_part(tensor.local, tensor.home_layout) if reduced is None else PARTS[reduced[0]](tensor, *reduced[1:])
        )
        part = part.reshape(-1)
        leaves = list(_leaves(of))
        return part if all(self.names.after(tuple(key), n, layout) is not None for key, n, layout in leaves) else None

    def _value(self, of: Any) -> HomeTensor | None:
        """Work out an expression of parameters on this rank's pieces."""
        if not isinstance(of[0], str):
            key, writes, layout = of
            return self.names.after(tuple(key), writes, layout)
        name, *args = of
        values = [self._value(arg) if isinstance(arg, list | tuple) else arg for arg in args]
        if any(value is None for value in values):
            return None
        layout = next(value.home_layout for value in values if isinstance(value, HomeTensor))
        pieces = [value.local if isinstance(value, HomeTensor) else value for value in values]
        return wrap(_op(name)(*pieces), layout)


def _op(name: str) -> Callable[..., Tensor]:
    """Return a point-wise op by its name; nothing else is run for other ranks."""
    if name == CAST:
        return lambda piece, dtype: piece.to(dtype_of(dtype))
    _, packet, overload = name.split(".")
    op: Callable[..., Tensor] = getattr(getattr(torch.ops.aten, packet), overload)
    if not is_pointwise(op):
        raise StateError(f"{name} is no point-wise op")
    return op


def _leaves(of: Any) -> Iterator[tuple[Any, int, str]]:
    """Yield what an expression reads: (key, writes, layout)."""
    if isinstance(of[0], str):
        for arg in of[1:]:
            yield from _leaves(arg) if isinstance(arg, list | tuple) else ()
    else:
        yield of


class _Runs(list["ref[SharedHomes]"]):
    """The runs of a rank whose home tensors others may read."""


_runs = partial(own, _Runs)


def _begun_collectives() -> int:
    """Return how many collectives this rank has begun in the world; -1 where nobody counts them."""
    world = world_group()
    begun = None if world is None else collectives_begun(world)
    return -1 if begun is None else begun


def _all_runs() -> list[SharedHomes]:
    return [run for run in (reference() for reference in _runs()) if run is not None]


def _weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a method that keeps its object no longer than others do: threads that answer keep no model alive."""
    held = WeakMethod(method)

    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        found = held()
        if found is None:
            raise StateError("the model is no longer there")
        return found(*args, **kwargs)

    return answer


class _OfRuns(LoneReads):
    """What one rank alone may read: of the run that knows what it is."""

    def whole(self, home: HomeTensor) -> Tensor:
        """Return the whole of a home tensor; one without a name is of the newest run, where all ranks ask."""
        runs = _all_runs()
        for find in (Names.name_of, Names.copy_name_of):
            for run in runs:
                key = find(run.names, home.local)
                if key is not None:
                    return run.whole(home, run.leaf(home, key))
        if (found := self.expression(home)) is not None:
            return found[0].whole(home, found[1])
        return runs[-1].whole(home, None) if runs else gather_whole([home])[0]

    def expression(self, home: HomeTensor) -> tuple[SharedHomes, Any] | None:
        """Return what a tensor is, in parameters of a run; None where all ranks must ask, and in an optimizer's step.

        There all ranks are at one place, and many tensors are read: one message among all is quicker.
        """
        if journal().is_stepping:
            return None
        made = vars(home).get(MADE_OF)
        if made is not None:
            writes, (run, of) = made
            return (run, of) if writes == version(home.local) and run.is_now(of) else None
        keys = ((run, run.names.key_of(home)) for run in _all_runs())
        return next(((run, run.leaf(home, key)) for run, key in keys if key is not None), None)

    def note_made(self, made: HomeTensor, op: Any, args: Sequence[Any]) -> None:
        """Remember what a new tensor was computed of, if that is parameters and numbers."""
        if op != CAST and not is_pointwise(op):
            return
        values = [self.expression(arg) if isinstance(arg, HomeTensor) else arg for arg in args]
        runs = {value[0] for value in values if isinstance(value, tuple)}
        if len(runs) != 1 or not all(isinstance(value, tuple | int | float | str) for value in values):
            return
        of = [str(op), *(value[1] if isinstance(value, tuple) else value for value in values)]
        if len(str(of)) < _MOST_CHARACTERS:
            vars(made)[MADE_OF] = version(made.local), (runs.pop(), of)


OPS.reads = _OfRuns()
