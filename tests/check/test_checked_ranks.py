"""Plans of a job of several processes are tried by one of them, and all hear what was found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hetu_fx
from hetu_fx.comm_ops.wire.consensus import all_gather_object
from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import CheckError
from hetu_fx.switching.step import batches
from tests.check.nets import GROUP, SHARES, Mlp, mlp_batch
from tests.ranks.checks import Outcome


def check_a_plan_that_is_right_trains_and_so_does_one_that_is_added(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(0)
    model, batch = Mlp().double(), {name: x.double() if x.is_floating_point() else x for name, x in mlp_batch().items()}
    alone = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        hetu_fx.auto_parallelize(model, batch, plan=SHARES, data="global", check=True)
        name = model.hetu.add_variant(GROUP)
    says = model.hetu.checks
    assert all(found.startswith("checked: loss and 4 gradients") for found in says.values()), says
    assert len(set(map(str, all_gather_object(GroupTable(), says)))) == 1
    for variant in ("variant0", name):
        model.hetu.switch(variant)
        loss, right = model(**batch), alone(**batch)
        assert abs(float(loss) - float(right)) < 1e-12
        loss.backward()


def check_a_plan_that_is_wrong_is_refused_on_all_with_the_same_words(rank: int, world: int, folder: Path) -> None:
    model, right = Mlp(), batches._counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "other"))
        patch.setattr(batches, "_counts", lambda *given: tuple(count + 1 for count in right(*given)))
        with pytest.raises(CheckError, match="the loss is") as raised:
            hetu_fx.auto_parallelize(model, mlp_batch(), plan=SHARES, check=True)
    assert len(set(all_gather_object(GroupTable(), str(raised.value)))) == 1
    assert not hasattr(model, "hetu")
    assert not any(hasattr(parameter, "home_layout") for parameter in model.parameters())


def check_a_plan_that_is_added_and_wrong_is_no_variant(rank: int, world: int, folder: Path) -> None:
    model, right = Mlp(), batches._counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "third"))
        hetu_fx.auto_parallelize(model, mlp_batch(), plan=GROUP, check=True)
        patch.setattr(batches, "_counts", lambda *given: tuple(count + 1 for count in right(*given)))
        with pytest.raises(CheckError, match="the loss is"):
            model.hetu.add_variant(SHARES, "wrong")
    assert "wrong" not in model.hetu.variants
    model(**mlp_batch()).backward()


def check_nothing_is_tried_where_that_was_said(rank: int, world: int, folder: Path) -> None:
    model = Mlp()
    hetu_fx.auto_parallelize(model, mlp_batch(), plan=SHARES, check=False)
    assert model.hetu.checks == {"variant0": "not checked: check=False"}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "check",
    [
        "check_a_plan_that_is_right_trains_and_so_does_one_that_is_added",
        "check_a_plan_that_is_wrong_is_refused_on_all_with_the_same_words",
        "check_a_plan_that_is_added_and_wrong_is_no_variant",
        "check_nothing_is_tried_where_that_was_said",
    ],
)
def test_one_process_tries_plans_for_all(check: str, gloo_checks: Callable[[str, int], Outcome]) -> None:
    assert gloo_checks(__file__, 2)[check] == [None, None]
