"""Ranks that have written parameters unequally often, or unlike values, are told which and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.comm_ops.wire.consensus import StepFacts
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import StateError
from hetu_fx.switching.home import writes
from hetu_fx.switching.home.ops import HomeTensor, home_layout
from hetu_fx.switching.home.parameters import Buffers
from hetu_fx.switching.home.writes import Writes

CUT = Annotation.on((0, 1), Split(0, (2, 1)))
WHOLE = torch.arange(12.0).view(6, 2)


class Ranks:
    """Two ranks in one process: each has its own view of what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.homes: list[Any] = [
            {
                name: nn.Parameter(HomeTensor.from_full(WHOLE, home_layout(CUT, (6, 2), rank, 2)))
                for name in ("first", "last")
            }
            for rank in range(2)
        ]
        self.models = [nn.BatchNorm1d(2) for _ in range(2)]
        tables = [GroupTable.dry(rank, 2) for rank in range(2)]
        self.writes = [
            Writes(table, homes, Buffers(model, table))
            for table, homes, model in zip(tables, self.homes, self.models, strict=True)
        ]
        self._told: Sequence[Any] = ()
        monkeypatch.setattr(writes, "all_gather_object", lambda table, mine: self._told)

    def check(self) -> None:
        """Do what each rank does at an agreement."""
        facts = StepFacts(rows=(1, 1), writes=tuple(one.told["writes"] for one in self.writes))
        self._told = [tuple(one.written) for one in self.writes]
        errors = []
        for one in self.writes:
            try:
                one.check(facts)
            except StateError as error:
                errors.append(error)
        assert len(errors) in (0, 2), "every rank is told"
        if errors:
            raise errors[0]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@torch.no_grad()
def test_what_all_write_alike_is_taken(ranks: Ranks) -> None:
    ranks.check()
    for homes in ranks.homes:
        homes["first"].copy_(WHOLE + 1)
        homes["last"].data.mul_(2)
        homes["last"].data = WHOLE * 3
    ranks.check()
    ranks.check()


@torch.no_grad()
@pytest.mark.parametrize("write", [lambda home: home.copy_(WHOLE), lambda home: home.mul_(2)])
def test_what_one_writes_alone_is_refused_until_the_others_follow(ranks: Ranks, write: Any) -> None:
    write(ranks.homes[1]["last"])
    for _ in range(2):
        with pytest.raises(StateError, match=r"parameter 'last' has been written unequally often.*'last' rank 1: "):
            ranks.check()
    write(ranks.homes[0]["last"])
    ranks.check()


@torch.no_grad()
def test_writes_of_another_parameter_do_not_make_up_for_it(ranks: Ranks) -> None:
    ranks.homes[0]["first"].zero_()
    ranks.homes[1]["last"].zero_()
    with pytest.raises(StateError, match="parameters 'first', 'last' have been written unequally often"):
        ranks.check()


@torch.no_grad()
@pytest.mark.parametrize(
    "write",
    [
        lambda home, whole: home.copy_(whole),
        lambda home, whole: home.add_(whole),
        lambda home, whole: torch._foreach_add_([home], [whole]),
        lambda home, whole: setattr(home, "data", whole),
    ],
)
def test_unlike_values_are_refused_and_rounding_is_not(ranks: Ranks, write: Any) -> None:
    for rank, homes in enumerate(ranks.homes):
        write(homes["first"], WHOLE * (1 + 1e-7 * rank))
    ranks.check()
    for rank, homes in enumerate(ranks.homes):
        write(homes["first"], WHOLE + rank)
    with pytest.raises(StateError, match="parameter 'first' has been written with unlike values"):
        ranks.check()
    ranks.check()


@torch.no_grad()
def test_unlike_constants_are_unlike_values(ranks: Ranks) -> None:
    for rank, homes in enumerate(ranks.homes):
        homes["first"].copy_(torch.full((6, 2), 1.0 + rank))
    with pytest.raises(StateError, match="parameter 'first' has been written with unlike values"):
        ranks.check()


@torch.no_grad()
def test_other_parameters_begin_anew(ranks: Ranks) -> None:
    ranks.homes[0]["first"].zero_()
    for one in ranks.writes:
        one.begin()
    ranks.check()


@torch.no_grad()
def test_buffers_that_one_rank_writes_alone_are_refused_until_the_others_follow(ranks: Ranks) -> None:
    ranks.models[0].running_mean.fill_(2)  # type: ignore[union-attr]
    for _ in range(2):
        with pytest.raises(
            StateError, match=r"buffer 'running_mean' has been written unequally often.* rank 0: 1 more"
        ):
            ranks.check()
    ranks.models[1].running_mean.fill_(2)  # type: ignore[union-attr]
    ranks.check()


@torch.no_grad()
def test_buffers_that_are_written_unlike_are_refused(ranks: Ranks) -> None:
    for rank, model in enumerate(ranks.models):
        model.running_var.fill_(2 + rank)  # type: ignore[union-attr]
    with pytest.raises(StateError, match="buffer 'running_var' has been written with unlike values"):
        ranks.check()
    ranks.check()


def test_one_process_has_nothing_to_compare() -> None:
    table = GroupTable.dry(0, 1)
    model = nn.BatchNorm1d(2)
    alone = Writes(table, {}, Buffers(model, table))
    model.reset_running_stats()
    assert not alone.told
    alone.check(StepFacts(rows=(1,)))


@torch.no_grad()
def test_nan_is_like_nan(ranks: Ranks) -> None:
    for homes in ranks.homes:
        homes["first"].copy_(WHOLE * torch.nan)
    ranks.check()


def _gradient_outside(home: Any, gradient: torch.Tensor) -> None:
    """Let a gradient come to a home parameter, as from what used it alone, which would gather it from processes."""
    torch.autograd.backward(home, gradient)


def test_gradients_from_outside_are_taken_where_they_are_alike(ranks: Ranks) -> None:
    for rank, homes in enumerate(ranks.homes):
        for _ in range(2):
            _gradient_outside(homes["first"], WHOLE * (1 + 1e-7 * rank))
    ranks.check()


def test_unlike_gradients_from_outside_are_refused_with_their_norms(ranks: Ranks) -> None:
    for rank, homes in enumerate(ranks.homes):
        _gradient_outside(homes["last"], WHOLE + rank)
    message = r"parameter 'last' had a gradient from outside .* norms 22\.49, 25\.5, by rank"
    with pytest.raises(StateError, match=message):
        ranks.check()
    ranks.check()


def test_a_gradient_from_outside_on_one_rank_alone_is_refused(ranks: Ranks) -> None:
    _gradient_outside(ranks.homes[1]["first"], WHOLE)
    with pytest.raises(StateError, match="norms none, 22"):
        ranks.check()


def test_gradients_of_pieces_are_not_from_outside(ranks: Ranks) -> None:
    home = ranks.homes[0]["first"]
    _gradient_outside(home, HomeTensor.from_full(WHOLE, home.home_layout))
    ranks.check()


def test_parameters_are_watched_once_also_with_another_dtype(ranks: Ranks) -> None:
    for homes in ranks.homes:
        homes["first"].data = homes["first"].data.double()
    ranks.check()
    for one in ranks.writes:
        one.begin()
    for rank, homes in enumerate(ranks.homes):
        _gradient_outside(homes["first"], WHOLE.double() * rank)
    with pytest.raises(StateError, match=r"norms 0, 22\.49"):
        ranks.check()
