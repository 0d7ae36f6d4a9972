"""Tensors that ranks read of each other: under which keys, what a rank holds of them, and why it gives none.

Optimizers by number, in the order of their first steps: the same on all ranks. What one has loaded is cut at a step.
All optimizers of home parameters: those that are known may be wrapped in one without hooks of its own (accelerate's
are). Their steps are noted in the journal, with what they go by.

Kernels over lists take home tensors as they are (see `pointwise`), which for 48 parameters takes 0.1 ms more in each of
the seven to twelve of a step. What each element becomes under torch's point-wise optimizers depends on that element
alone, so all of a step's kernels are given the pieces, once.

On a host torch makes no lists of its own accord: each op on each home tensor is a dispatch then, which for small pieces
is most of a step. Lists have copies of all pieces for a moment; so it is for small ones alone that they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetu_fx.annotations.local import index
from hetu_fx.base.patches import Hook, Patch, register_patch
from hetu_fx.base.torch_private import SORT_OF_LISTS, Lists, foreach_copy, sorting_others, version
from hetu_fx.errors import StateError
from hetu_fx.switching.home.journal import GRADIENTS, NAMED, Gradients, Rates, journal
from hetu_fx.switching.home.layout import HomeLayout
from hetu_fx.switching.home.parameters import cut_optimizer_state
from hetu_fx.switching.home.pointwise import layouts_alike
from hetu_fx.switching.home.tensor import HomeTensor, PiecesWritten, Read, local_of, wrap

_POINTWISE = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Adafactor and Muon look at whole parameters; what a subclass does is not known."""

_LISTED_ALIKE = _POINTWISE - {torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam}
"""Of these, torch's kernels over lists give every bit of its loop; the others' take their factors in another order."""

_SMALL_BYTES = 1 << 24
_NO_LISTS = "fused", "capturable", "differentiable"


class _PointwiseStep(NamedTuple):
    """A step of an optimizer whose kernels may have pieces.

    Attributes:
        uncounted: how often they write without counting it in versions, as torch's fused kernels do once.
        listed: groups that are asked for lists in it, which torch would not make.
    """

    uncounted: int
    listed: Sequence[dict[str, Any]]


def begin_step(optimizer: Optimizer, *_: object) -> None:
    """Note a step of an optimizer, and let it have pieces for its kernels, if it is a point-wise one."""
    end_step()  # the one before may have ended by an error
    noted = journal()
    has_homes = any(isinstance(p, HomeTensor) for group in optimizer.param_groups for p in group["params"])
    if has_homes and optimizer not in noted.optimizers:  # others may be one rank's own, and would shift numbers
        noted.number(optimizer)
        optimizer.register_load_state_dict_post_hook(cut_optimizer_state)
        cut_optimizer_state(optimizer)
    noted.begin_step(optimizer_rates(optimizer) if has_homes else None)
    fused = {bool(group.get("fused")) for group in optimizer.param_groups}
    if type(optimizer) in _POINTWISE and len(fused) == 1:
        listed = filter(_is_small_on_host, optimizer.param_groups) if type(optimizer) in _LISTED_ALIKE else ()
        noted.pointwise = _PointwiseStep(int(True in fused), list(listed))
        for group in noted.pointwise.listed:
            group["foreach"] = True


def end_step(*_: object) -> None:
    """Note writes again, and let whatever follows have home tensors."""
    noted = journal()
    for group in noted.pointwise.listed if noted.pointwise is not None else ():
        group["foreach"] = None
    noted.pointwise, noted.is_stepping = None, False


def _is_small_on_host(group: Mapping[str, Any]) -> bool:
    """Tell whether torch would make no lists of a group though nothing keeps it from it, and its pieces are small."""
    options = chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in group.values())
    if group.get("foreach", False) is not None or any(map(group.get, _NO_LISTS)):
        return False
    if any(isinstance(option, Tensor) for option in options) or set(map(type, group["params"])) != {HomeTensor}:
        return False
    pieces = list(map(local_of, group["params"]))
    return all(map(attrgetter("is_cpu"), pieces)) and sum(map(attrgetter("nbytes"), pieces)) <= _SMALL_BYTES


def _on_pieces(lists: Lists, with_indices: bool) -> tuple[Lists, Callable[[], None]] | None:
    """Return the lists with pieces in the places of home tensors, and what is to be called once they are written.

    What this rank has nothing of is left out, unless `with_indices` positions are told: of two stages each has half of
    the parameters, and kernels of a host take as long for those without elements as for small ones.

    None where there are none, or where kernels have more to do: tensors of several homes, or whole ones, side by side;
    or states that are made in the step.
    """
    step: _PointwiseStep | None = journal().pointwise
    if step is None:
        return None
    found = layouts_alike(lists)
    if found is None:
        return None
    layouts, are_homes = found
    written = PiecesWritten([tensors for tensors, here in zip(lists, are_homes, strict=True) if here], step.uncounted)
    pieces = iter(written.pieces)
    given = [next(pieces) if here else tensors for tensors, here in zip(lists, are_homes, strict=True)]
    numbers = [tensors for tensors, here in zip(lists, are_homes, strict=True) if tensors and not here]
    like = {} if with_indices else _absent(written.pieces[0], numbers)
    if not like:
        return given, written.end
    kept = [position for position in range(len(layouts)) if position not in like]
    return [tensors and [tensors[i] for i in kept] for tensors in given], partial(
        _pieces_written, written, numbers, like
    )


def _absent(pieces: Sequence[Tensor], numbers: Lists) -> dict[int, int]:
    """Return the positions of which there is no element here, each with another of the same numbers that has some.

    Numbers, of steps for example, become the same where they were the same. None where reading them waits for a device.
    """
    if all(piece.numel() for piece in pieces) or not all(x.is_cpu for tensors in numbers for x in tensors):
        return {}
    found = list(zip(*(map(Tensor.item, tensors) for tensors in numbers), strict=True)) or [()] * len(pieces)
    held = {key: position for position, key in enumerate(found) if pieces[position].numel()}
    return {i: held[key] for i, key in enumerate(found) if key in held and not pieces[i].numel()}


def _pieces_written(written: PiecesWritten, numbers: Lists, like: Mapping[int, int]) -> None:
    written.end(like)
    for tensors in numbers:
        foreach_copy([tensors[i] for i in like], [tensors[i] for i in like.values()])


register_patch(
    Patch(
        "torch",
        *SORT_OF_LISTS,
        why="kernels over lists would take home tensors apart anew, seven to twelve times a step",
        tested="2.13",
        wrap=sorting_others(_on_pieces),
        is_needed=False,
    )
)


def numbered_optimizers() -> tuple[tuple[Optimizer, int], ...]:
    """Return all optimizers of home parameters that have been stepped, with their numbers; from any thread."""
    return tuple(journal().optimizers.items())


def optimizer_rates(optimizer: Optimizer) -> Rates:
    """Return the numbers that an optimizer goes by now: rates, momenta, decays."""
    return tuple(tuple(_rates(group.items())) for group in optimizer.param_groups)


def _rates(options: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, tuple[float, ...]]]:
    for name, value in options:
        numbers = tuple(map(float, filter(_is_number, value if isinstance(value, tuple) else (value,))))
        if numbers and name != "params":
            yield name, numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):  # elsewhere than on the host, reading one waits
        return value.numel() == 1 and value.device.type == "cpu"
    return isinstance(value, (int, float))


for register, hook, why in (
    (register_optimizer_step_pre_hook, begin_step, "steps would not be noted, and loaded states of optimizers not cut"),
    (register_optimizer_step_post_hook, end_step, "what follows a step would be taken for a part of it"),
):
    register_patch(
        Hook("torch", "torch.optim.optimizer", register.__name__, why, tested="2.13", register=partial(register, hook))
    )


JOINT = "read by all ranks"
COPIED = "copied after"
GRADIENT = "gradient"

Key = tuple[str, ...]
"""A parameter's name; that, an optimizer's number and a key of its state; that, GRADIENT and the number of a backward;
one of the first two, when it was copied and in which dtype; or what tells readings by all ranks apart."""

_KEPT_WHOLES, _KEPT_NUMBERS = 4, 4096  # readings of one tensor, and of numbers: so far ranks may be apart
_GONE_WRITES = 1 << 62
_NO_GRADIENTS = Gradients(0, {})


@dataclass(frozen=True, slots=True)
class Readable:
    """A tensor that others may read.

    Attributes:
        counts: what counts its writes: a home tensor, or the piece of a copy; None for what is no longer there.
        piece: this rank's part; None while that is on its way between homes.
        layout: says what part it is.
    """

    counts: Tensor | None
    piece: Tensor | None
    layout: HomeLayout | None

    @classmethod
    def home(cls, tensor: HomeTensor) -> Readable:
        """Return a home tensor as what it is now, without waiting for its piece."""
        return cls(tensor, tensor.__dict__.get("local"), tensor.__dict__.get("home_layout"))

    @property
    def writes(self) -> int:
        """How often it has been written; more often than any that asks if it is no longer there."""
        return _GONE_WRITES if self.counts is None else version(self.counts)

    def after(self, writes: int, layout: str) -> HomeTensor | None:
        """Return it as it is after so many writes; None if it has another value, or none at the moment."""
        if self.writes != writes or self.piece is None or self.layout is None:
            return None
        if str(self.layout.annotation) != layout:
            raise StateError(f"it lies as {self.layout.annotation} there, as {layout} where it is asked for")
        return wrap(self.piece, self.layout)


class Readings:
    """This rank's parts of what it has read itself, for ranks that read it later, while this writes and reads on."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Tensor]] = {}

    def keep(self, read: Read, part: Tensor) -> None:
        """Keep a part, and some of what was kept of the same kind before."""
        kind, most = (json.dumps(read[0][0]), _KEPT_WHOLES) if read[1] is None else ("numbers", _KEPT_NUMBERS)
        kept = self._kept.setdefault(kind, {})
        kept[json.dumps(read)] = part
        if len(kept) > most:
            del kept[next(iter(kept))]

    def part(self, read: Read) -> Tensor | None:
        """Return what was read; from any thread."""
        text = json.dumps(read)
        return next((kept[text] for kept in tuple(self._kept.values()) if text in kept), None)

    def clear(self) -> None:
        """Let go of all."""
        self._kept.clear()


def host_part(local: Tensor, layout: HomeLayout) -> Tensor:
    """Return the elements that this rank counts in host memory, in the order of its chunks."""
    pieces = [local[index(place)].reshape(-1) for _, place in layout.counted_chunks]
    return torch.cat(pieces).cpu() if pieces else local.new_empty(0, device="cpu")


def is_copy(key: Key) -> bool:
    """Tell whether a key is of a copy."""
    return COPIED in key[1:]


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
        self._first = next(iter(self.homes.values()), None)
        for name, home in self.homes.items():
            vars(home)[NAMED] = (name,)

    def key_of(self, home: HomeTensor) -> Key | None:
        """Return the key of a parameter, or of the gradient that the last backward has left; None if it is neither."""
        mark = vars(home).get(NAMED)
        if mark is None:
            return None
        (name, *backward), found = mark, self._gradients
        its = (found.of if backward else self.homes).get(name)
        if its is None or vars(its).get(NAMED) != mark or vars(its).get("local") is not home.local:
            return None
        return (name, GRADIENT, str(found.backward)) if backward else (name,)

    def forget_gradients(self) -> None:
        """Keep no gradient for ranks that read it later, but those that still stand at their parameters."""
        found = self._gradients
        if found.of and self._first is not None:
            here = {name: home.grad for name, home in self.homes.items() if home.is_leaf and home.grad is not None}
            kept = {name: one for name, one in here.items() if one is found.of.get(name)}
            vars(self._first)[GRADIENTS] = found._replace(of=kept)

    @property
    def _gradients(self) -> Gradients:
        found: Gradients | None = None if self._first is None else vars(self._first).get(GRADIENTS)
        return found or _NO_GRADIENTS

    def _held_gradient(self, name: str, count: int) -> list[Readable]:
        found = self._gradients
        if found.backward < count:
            return []
        gradient = found.of.get(name) if found.backward == count else None
        return [Readable.home(gradient) if isinstance(gradient, HomeTensor) else Readable(None, None, None)]

    def name_of(self, piece: Tensor) -> Key | None:
        """Return the key of the parameter, or the optimizer's state, whose piece this is; None if it is of none."""
        for is_new in (False, True):
            if is_new or self._swaps != journal().swaps:
                self._swaps = journal().swaps
                self._index = {id(tensor.local): (key, tensor) for key, tensor in self._named()}
            found = self._index.get(id(piece))
            if found is not None and found[1].local is piece:
                return found[0]
            if journal().copy_at(piece) is not None:  # most likely nothing that the index has missed: there are many
                return None
        return None

    def copy_name_of(self, piece: Tensor) -> Key | None:
        """Return the key of a copy of something with a name; None if it is none, or one of several."""
        key = self._copy_key(piece)
        if key is None or version(piece) == 0:
            return key
        alike = [held for held in self.held(key) if held.writes == version(piece)]
        return key if len(alike) == 1 else None

    def _copy_key(self, piece: Tensor) -> Key | None:
        copied = journal().copy_at(piece)
        source = None if copied is None else copied.source()
        if copied is None or source is None:
            return None
        origin = self.name_of(source) or self._copy_key(source)
        return None if origin is None else (*origin, COPIED, str(copied.writes), str(piece.dtype))

    def held(self, key: Key) -> list[Readable]:
        """Return what this rank holds under a key: several, if it is one of copies."""
        if key[0] not in self.homes:
            return []
        if is_copy(key):
            alike = [(p, its) for p, its in journal().copies() if (str(its.writes), str(p.dtype)) == key[-2:]]
            return [Readable(piece, piece, its.layout) for piece, its in alike if self._copy_key(piece) == key]
        if len(key) == 1:
            return [Readable.home(self.homes[key[0]])]
        if key[1] == GRADIENT:
            return self._held_gradient(key[0], int(key[2]))
        name, number, state = key
        found = [
            one.state.get(self._parameters[name], {}).get(state)
            for one, its in numbered_optimizers()
            if its == int(number)
        ]
        return [Readable.home(tensor) for tensor in found if isinstance(tensor, HomeTensor)]

    def after(self, key: Key, writes: int, layout: str) -> HomeTensor | None:
        """Return what is held under a key after so many writes; None if it is not here now.

        Of a copy that nobody has written since it may be its source.

        Raises:
            StateError: there are several, or it lies otherwise.
        """
        held = self.held(key)
        found = [tensor for one in held if (tensor := one.after(writes, layout)) is not None]
        if len(found) > 1 and writes:
            raise StateError(f"there are {len(found)} of them here")
        if found or not is_copy(key) or writes:
            return found[0] if found else None
        *source, _, made, dtype = key
        copied = self.after(tuple(source), int(made), layout)
        return None if copied is None else wrap(copied.local.to(dtype_of(dtype)), copied.home_layout)

    def _named(self) -> Iterator[tuple[Key, HomeTensor]]:
        for name, home in self.homes.items():
            yield (name,), home
            for optimizer, number in numbered_optimizers():
                for key, value in list(optimizer.state.get(self._parameters[name], {}).items()):  # threads ask too
                    if isinstance(value, HomeTensor):
                        yield (name, str(number), str(key)), value


def _home(parameter: nn.Parameter) -> HomeTensor:
    assert isinstance(parameter, HomeTensor)
    return parameter


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


def why_not(key: Key, held: Sequence[Readable], wanted: int, asker: int, seconds: float) -> str:
    """Return why a rank that asks is given nothing after so many seconds, and the way out."""
    way_out = "call full_tensor(), or model.hetu.save(folder), on every rank"
    if key[0] == JOINT:
        return (
            f"rank {asker} reads a tensor of shape {key[2]} that is neither a parameter nor its gradient, nor an "
            f"optimizer's state (it is a result), and this rank has not read it too within {seconds:g} s; {way_out}"
        )
    what, when = _described(key)
    writes = [one.writes for one in held]
    if key[1:2] == (GRADIENT,) and not held:
        return f"rank {asker} reads {what}, which this rank has not had within {seconds:g} s; {way_out}"
    if len(writes) != 1:
        return f"rank {asker} reads {what}, of which there are {len(writes)} here after {seconds:g} s; {way_out}"
    if writes[0] > wanted:
        made = "" if held[0].counts is None else f" and made {writes[0]}"
        return (
            f"rank {asker} reads {what} as it was after {wanted} writes, and this rank has gone on{made}; "
            f"read {when}, or {way_out}"
        )
    return (
        f"rank {asker} reads {what} after {wanted} writes, and this rank has made {writes[0]} in {seconds:g} s; "
        f"make the same writes on all ranks, or {way_out}"
    )


def _described(key: Key) -> tuple[str, str]:
    """Return what a key is of, and when one rank alone may read that."""
    when = "between optimizer.step() and the next call of the model"
    if key[1:2] == (GRADIENT,):
        return f"the gradient of {key[0]!r}", "between backward() and what writes gradients next"
    what = f"the optimizer's {key[2]!r} of {key[0]!r}" if len(key) in (3, 6) else f"parameter {key[0]!r}"
    return f"a copy of {what}" if is_copy(key) else what, when
