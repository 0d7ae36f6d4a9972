"""Optimizers by number, in the order of their first steps: the same on all ranks. What one has loaded is cut at a step.

All optimizers of home parameters: those that are known may be wrapped in one without hooks of its own (accelerate's
are). Their steps are noted in the journal, with what they go by.

Kernels over lists take home tensors as they are (see `pointwise`), which for 48 parameters takes 0.1 ms more in each of
the seven to twelve of a step. What each element becomes under torch's point-wise optimizers depends on that element
alone, so all of a step's kernels are given the pieces, once.

On a host torch makes no lists of its own accord: each op on each home tensor is a dispatch then, which for small pieces
is most of a step. Lists have copies of all pieces for a moment; so it is for small ones alone that they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hetu_fx.base.patches import Hook, Patch, register_patch
from hetu_fx.base.torch_private import SORT_OF_LISTS, Lists, foreach_copy, sorting_others
from hetu_fx.switching.home.journal import Rates, journal
from hetu_fx.switching.home.parameters import cut_optimizer_state
from hetu_fx.switching.home.pointwise import are_numbers
from hetu_fx.switching.home.tensor import HomeTensor, PiecesWritten, home_layout_of, local_of

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


def begin_step(optimizer: Optimizer) -> None:
    """Let an optimizer have pieces for its kernels, if it is a point-wise one."""
    end_step()  # the one before may have ended by an error
    fused = {bool(group.get("fused")) for group in optimizer.param_groups}
    stepping = journal().stepping
    stepping.is_pointwise = type(optimizer) in _POINTWISE and len(fused) == 1
    stepping.uncounted = int(True in fused)
    if type(optimizer) in _LISTED_ALIKE and stepping.is_pointwise:
        stepping.listed = list(filter(_is_small_on_host, optimizer.param_groups))
        for group in stepping.listed:
            group["foreach"] = True


def end_step() -> None:
    """Let whatever follows have home tensors."""
    stepping = journal().stepping
    stepping.is_pointwise = False
    for group in stepping.listed:
        group["foreach"] = None
    stepping.listed = ()


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
    if not journal().stepping.is_pointwise:
        return None
    are_homes = [set(map(type, tensors)) == {HomeTensor} for tensors in lists]
    homes = [tensors for tensors, here in zip(lists, are_homes, strict=True) if here]
    others = [tensors for tensors, here in zip(lists, are_homes, strict=True) if not here]
    if not homes or not all(map(are_numbers, others)):
        return None
    layout, *layouts = (list(map(home_layout_of, tensors)) for tensors in homes)
    if any(one != layout for one in layouts):
        return None
    written = PiecesWritten(homes, journal().stepping.uncounted)
    pieces = iter(written.pieces)
    given = [next(pieces) if here else tensors for tensors, here in zip(lists, are_homes, strict=True)]
    numbers = [tensors for tensors in others if tensors]
    like = {} if with_indices else _absent(written.pieces[0], numbers)
    if not like:
        return given, written.end
    kept = [position for position in range(len(layout)) if position not in like]
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


def _begin(optimizer: Optimizer, *_: object) -> None:
    has_homes = any(isinstance(p, HomeTensor) for p in _parameters(optimizer))
    if has_homes and optimizer not in journal().optimizers:  # others may be one rank's own, and would shift numbers
        journal().number(optimizer)
        optimizer.register_load_state_dict_post_hook(cut_optimizer_state)
        cut_optimizer_state(optimizer)
    journal().begin_step(optimizer_rates(optimizer) if has_homes else None)
    begin_step(optimizer)


def _parameters(optimizer: Optimizer) -> Iterable[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _end(*_: object) -> None:
    end_step()
    journal().end_step()


for register, hook, why in (
    (register_optimizer_step_pre_hook, _begin, "steps would not be noted, and loaded states of optimizers not cut"),
    (register_optimizer_step_post_hook, _end, "what follows a step would be taken for a part of it"),
):
    register_patch(
        Hook("torch", "torch.optim.optimizer", register.__name__, why, tested="2.13", register=partial(register, hook))
    )
