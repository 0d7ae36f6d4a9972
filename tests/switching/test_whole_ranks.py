"""The plain module for a while, on two gloo ranks: what is gathered, kept and freed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.errors import BatchError, StateError
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.home.ops import HomeTensor
from tests.model_zoo import ConvNet, conv_batch, llama
from tests.ranks.checks import assert_all_pass

WORLD = 2


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_on_two_ranks(gloo_checks: Callable[..., dict[str, list[str | None]]]) -> None:
    assert_all_pass(gloo_checks(__file__, WORLD, 180), WORLD)


def parallel(**options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    batch = conv_batch(4, 0)
    return hetu_fx.auto_parallelize(ConvNet(), batch, plan=Plan.data_parallel((0, 1), (3, 1)), **options), batch


def messages_of(model: Any, act: Callable[[], object]) -> int:
    heard: list[str] = []
    model.hetu.on_communication(lambda what, start, end: heard.append(what))
    act()
    model.hetu.on_communication(None)
    return len(heard)


def enter(model: Any) -> None:
    with model.hetu.whole():
        pass


def check_copies_are_kept_until_the_next_training_step(rank: int, world: int, folder: Path) -> None:
    model, batch = parallel()
    first, second = (messages_of(model, lambda: enter(model)) for _ in range(2))
    assert second == 1 < first, "entering again takes one agreement"
    model(**batch)["loss"].backward()
    assert messages_of(model, lambda: enter(model)) > 1


def check_copies_are_freed_on_leaving_where_they_are_too_large(rank: int, world: int, folder: Path) -> None:
    model, _ = parallel(options=hetu_fx.Options(idle_bytes=0))
    assert messages_of(model, lambda: enter(model)) == messages_of(model, lambda: enter(model)) > 1


def check_nothing_is_sent_inside(rank: int, world: int, folder: Path) -> None:
    model, batch = parallel()
    with model.hetu.whole():
        model.eval()
        assert messages_of(model, lambda: [model(**batch) for _ in range(rank)]) == 0


def check_a_rank_that_does_not_enter_is_told_of(rank: int, world: int, folder: Path) -> None:
    model, batch = parallel()
    with pytest.raises(BatchError, match=r"model\.hetu\.whole\(\)"), torch.no_grad():
        enter(model) if rank == 0 else model(**batch)


def check_a_rank_enters_alone_while_the_others_go_on_to_train(rank: int, world: int, folder: Path) -> None:
    model, batch = parallel()
    if rank == 0:
        with model.hetu.whole():
            assert not isinstance(model.head.weight, HomeTensor)
            assert model.eval()(**batch)["loss"].isfinite()
        model.train()
    model(**batch)["loss"].backward()


def check_a_rank_without_room_is_refused_alone_and_all_go_on(rank: int, world: int, folder: Path) -> None:
    model, batch = parallel()
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hetu_fx.switching.whole.memory_left", lambda device: (("gpu", 1),))
            with torch.no_grad(), pytest.raises(StateError, match=r"rank 1 has 1 bytes left of 'gpu'"):
                model(**batch)
    model(**batch)["loss"].backward()


def check_ranks_without_room_are_named_on_all(rank: int, world: int, folder: Path) -> None:
    model, _ = parallel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetu_fx.switching.whole.memory_left", lambda device: ((f"gpu {rank}", 1 << 40 - 30 * rank),))
        with pytest.raises(StateError, match=r"rank 1 has 1024 bytes left of 'gpu 1'"):
            enter(model)
    enter(model)


def check_a_replaced_parameter_is_refused_and_the_home_comes_back(rank: int, world: int, folder: Path) -> None:
    model, _ = parallel()
    home = model.head.weight
    with pytest.raises(StateError, match=r"\['head.weight'\] were written or replaced"), model.hetu.whole():
        model.head.weight = nn.Parameter(torch.zeros(13, 20))
    assert model.head.weight is home


def check_a_backward_to_parameters_is_refused_and_an_error_inside_is_the_users_own(
    rank: int, world: int, folder: Path
) -> None:
    model, batch = parallel()
    model.eval()  # running statistics are not to be written
    home = model.head.weight
    with model.hetu.whole(), pytest.raises(StateError, match=r"train outside of it"):
        model(**batch)["loss"].backward()
    with pytest.raises(ZeroDivisionError), model.hetu.whole():
        fail(model)
    assert model.head.weight is home


def fail(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(13, 20))
    raise ZeroDivisionError


def check_tied_parameters_are_one_inside(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    model: Any = llama(tie_word_embeddings=True)
    batch = {"input_ids": torch.ones(2, 6, dtype=torch.long), "labels": torch.ones(2, 6, dtype=torch.long)}
    model = hetu_fx.auto_parallelize(model, batch, plan=Plan.tensor_parallel((0, 1)))
    with model.hetu.whole():
        assert model.lm_head.weight is model.model.embed_tokens.weight
