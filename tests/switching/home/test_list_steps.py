"""Steps of point-wise optimizers give their list kernels the pieces of home tensors, and every write is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.switching.home import held
from hetu_fx.switching.home.held import numbered_optimizers
from hetu_fx.switching.home.journal import journal
from hetu_fx.switching.home.ops import HomeTensor, home_layout
from hetu_fx.switching.home.tensor import OPS

CUT = home_layout(Annotation.on((0, 1), Split(0, (2, 1))), (6, 4), 0, 2)
ELSEWHERE = home_layout(Annotation.on((1,)), (6, 4), 0, 2)
ALONE = home_layout(Annotation.on((0,)), (6, 4), 0, 1)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=True, weight_decay=0.1),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, fused=True, weight_decay=0.1),
    "adam, fused": lambda p: torch.optim.Adam(p, fused=True, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, foreach=True, maximize=True, weight_decay=0.1),
    "adamw, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, foreach=True, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


class OwnAdamW(torch.optim.AdamW):
    """An optimizer of which nothing is known but what it is made of."""


def homes(layout: Any = CUT) -> list[nn.Parameter]:
    values = [torch.arange(24.0).view(6, 4) / (number + 1) for number in range(3)]
    return [nn.Parameter(HomeTensor.from_full(value, layout)) for value in values]


def set_gradients(parameters: list[nn.Parameter], number: int) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, number - 1.5)


def written(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[tuple[int, int, torch.Tensor]]:
    """Return the versions and the pieces of parameters and of what an optimizer keeps of them.

    A copy into one state, as Rprop makes, counts once more in its home tensor than in its piece.
    """
    states = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    found: list[Any] = [state for state in states if isinstance(state, HomeTensor)]
    assert all(state._version >= state.local._version for state in found)
    tensors: list[Any] = [*parameters, *found]
    own = [parameter._version for parameter in parameters] + [0] * len(found)
    return [(count, tensor.local._version, tensor.local) for count, tensor in zip(own, tensors, strict=True)]


def trained(make: Callable[[Any], torch.optim.Optimizer], *others: nn.Parameter) -> list[tuple[int, int, torch.Tensor]]:
    parameters = [*others, *homes()]
    optimizer = make(parameters)
    for number in range(3):
        set_gradients(parameters, number)
        optimizer.step()
    return written(parameters, optimizer)


@contextmanager
def list_kernels_of_homes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note the list kernels that are given home tensors."""
    seen: list[str] = []

    def noting(op: Any, handler: Any) -> Any:
        return lambda func, args, kwargs: [seen.append(str(op)), handler(func, args, kwargs)][1]

    with monkeypatch.context() as patch:
        for op, handler in list(OPS.items()):
            if "_foreach_" in str(op) or "_fused_" in str(op):
                patch.setitem(OPS, op, noting(op, handler))
        yield seen


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_pieces_write_the_same_as_often(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(OPTIMIZERS[name])
    monkeypatch.setattr(held, "_POINTWISE", frozenset())
    expected = trained(OPTIMIZERS[name])
    assert [versions for *versions, _ in found] == [versions for *versions, _ in expected]
    assert all(torch.equal(piece, other) for (*_, piece), (*_, other) in zip(found, expected, strict=True))


def numbers_of(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Return the numbers among the states of each parameter."""
    states = [optimizer.state[parameter].values() for group in optimizer.param_groups for parameter in group["params"]]
    return [[float(x) for x in of_one if not isinstance(x, HomeTensor) and x is not None] for of_one in states]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_rank_has_nothing_of_comes_out_as_if_kernels_had_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.optim.Optimizer] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(OPTIMIZERS[name](parameters))
        return made[-1]

    found = trained(make, *homes(ELSEWHERE))
    monkeypatch.setattr(held, "_POINTWISE", frozenset())
    expected = trained(make, *homes(ELSEWHERE))
    assert [versions for *versions, _ in found] == [versions for *versions, _ in expected]
    assert all(torch.equal(piece, other) for (*_, piece), (*_, other) in zip(found, expected, strict=True))
    assert numbers_of(made[0]) == numbers_of(made[1])


def test_kernels_do_without_what_a_rank_has_nothing_of(monkeypatch: pytest.MonkeyPatch) -> None:
    lerp, given = torch._foreach_lerp_, []
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *args: [given.append(len(args[0])), lerp(*args)])
    parameters = [*homes(ELSEWHERE), *homes()]
    optimizer = OPTIMIZERS["adamw"](parameters)
    for number in range(2):
        set_gradients(parameters, number)
        optimizer.step()
    optimizer.state[parameters[0]]["step"].fill_(7.0)  # which none has that this rank has something of
    set_gradients(parameters, 2)
    optimizer.step()
    assert given == [3, 3, 4]
    assert [steps for (steps,) in numbers_of(optimizer)] == [8.0, 3.0, 3.0, 3.0, 3.0, 3.0]


def test_a_rank_that_has_nothing_at_all_counts_its_steps() -> None:
    optimizer = OPTIMIZERS["adamw"](parameters := homes(ELSEWHERE))
    set_gradients(parameters, 0)
    optimizer.step()
    assert numbers_of(optimizer) == [[1.0]] * 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_of_a_step_are_given_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = homes()
    optimizer = OPTIMIZERS[name](parameters)
    for number in range(2):  # the first of SGD makes its states
        set_gradients(parameters, number)
        with list_kernels_of_homes(monkeypatch) as seen:
            optimizer.step()
    assert seen == []
    assert optimizer in dict(numbered_optimizers()), "its steps are followed"


AS_TORCH_MAKES_THEM: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", AS_TORCH_MAKES_THEM)
def test_small_pieces_on_a_host_are_stepped_by_lists_as_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = AS_TORCH_MAKES_THEM[name], list[torch.optim.Optimizer]()
    found = trained(lambda p: [made.append(make(p)), made[0]][1])
    assert [group["foreach"] for group in made[0].param_groups] == [None]
    monkeypatch.setattr(held, "_SMALL_BYTES", -1)
    for (*_, piece), (*_, other) in zip(found, trained(make), strict=True):
        torch.testing.assert_close(piece, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"fused": True}, {"differentiable": True}, {"lr": torch.tensor(0.1)}], ids=str
)
def test_a_group_that_asks_for_something_else_gets_it(options: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW(homes(), **options)
    held.begin_step(optimizer)
    assert optimizer.param_groups[0]["foreach"] is options.get("foreach")
    held.end_step()


def test_a_step_that_fails_leaves_a_group_as_it_was_once_another_one_begins() -> None:
    optimizer = torch.optim.AdamW(homes())
    held.begin_step(optimizer)
    assert optimizer.param_groups[0]["foreach"] is True
    held.begin_step(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    assert optimizer.param_groups[0]["foreach"] is None
    held.end_step()


def test_kernels_of_another_optimizer_are_given_home_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    trained(OPTIMIZERS["adamw"])
    trained(lambda p: OwnAdamW(p, foreach=True))  # so that all kernels are known
    parameters = homes()
    optimizer = OwnAdamW(parameters, foreach=True)
    set_gradients(parameters, 0)
    with list_kernels_of_homes(monkeypatch) as seen:
        optimizer.step()
    assert "aten._foreach_lerp_.Scalar" in seen


def test_what_kernels_write_without_counting_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = homes()
    optimizer = torch.optim.AdamW(parameters, fused=True)
    set_gradients(parameters, 0)
    optimizer.step()
    assert [(home._version, home.local._version) for home in parameters] == [(1, 1)] * 3  # type: ignore[attr-defined]


def test_kernels_of_groups_of_which_some_are_fused_are_given_home_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, others = homes(), homes()
    optimizer = torch.optim.AdamW([{"params": fused, "fused": True}, {"params": others, "foreach": True}])
    set_gradients([*fused, *others], 0)
    optimizer.step()
    set_gradients([*fused, *others], 1)
    with list_kernels_of_homes(monkeypatch) as seen:
        optimizer.step()
    assert {"aten._fused_adamw_.default", "aten._foreach_lerp_.Scalar"} <= set(seen)
    for one, other in zip(fused, others, strict=True):
        torch.testing.assert_close(one.local, other.local)  # type: ignore[attr-defined]


def test_what_is_whole_beside_home_tensors_is_cut() -> None:
    parameters, others = homes(), homes()
    for number in range(2):
        set_gradients(parameters, number)
        for other in others:
            other.grad = torch.full((6, 4), number - 1.5)
        for some in (parameters, others):
            optimizer = torch.optim.SGD(some, lr=0.1, foreach=True)
            optimizer.step()
    assert all(torch.equal(one.local, other.local) for one, other in zip(parameters, others, strict=True))  # type: ignore[attr-defined]


def test_parameters_of_two_homes_are_stepped_together() -> None:
    parameters = [*homes(CUT), *homes(ALONE)]
    optimizer = OPTIMIZERS["adamw"](parameters)
    set_gradients(parameters, 0)
    optimizer.step()
    cut, alone = parameters[0], parameters[3]
    assert torch.equal(alone.local[:4], cut.local)  # type: ignore[attr-defined]


def test_nobody_reads_pieces_while_kernels_write_them_nor_counts_later_writes_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = homes()
    optimizer = OPTIMIZERS["adamw"](parameters)
    set_gradients(parameters, 0)
    lerp, read, look = torch._foreach_lerp_, [], journal().undisturbed
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *args: [read.append(look(lambda: 1)), lerp(*args)])
    optimizer.step()
    assert (read, look(lambda: 1)) == ([None], 1)
    versions = [parameter._version for parameter in parameters]
    torch._foreach_mul_([parameter.detach() for parameter in parameters], 2.0)
    assert [parameter._version - 1 for parameter in parameters] == versions


def test_a_kernel_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = homes()
    optimizer = OPTIMIZERS["adamw"](parameters)
    set_gradients(parameters, 0)
    versions = [parameter._version for parameter in parameters]

    def fail(*args: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_lerp_", fail)
        with pytest.raises(RuntimeError, match="no room"):
            optimizer.step()
    assert journal().undisturbed(lambda: 1) == 1
    assert [parameter._version - 1 for parameter in parameters] == versions  # weight decay comes first
    optimizer.step()
    assert [parameter._version - 3 for parameter in parameters] == versions
