"""Home tensors in one process: what they are, what they refuse, how they count writes."""

from __future__ import annotations

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hetu_fx.annotations.annotation import Annotation, Duplicate, Split
from hetu_fx.errors import StateError
from hetu_fx.switching.home.ops import OPS, HomeTensor, PendingNorm, _norm_readings, home_layout
from hetu_fx.switching.home.parameters import cut_optimizer_state

ALONE = home_layout(Annotation.on((0,)), (6, 4), 0, 1)
CUT = Annotation.on((0, 1), Split(0, (2, 1)))


def parameter() -> nn.Parameter:
    return nn.Parameter(HomeTensor.from_full(torch.arange(24.0).view(6, 4), ALONE))


def test_a_parameter_keeps_class_shape_and_kind() -> None:
    home = parameter()
    assert isinstance(home, HomeTensor)
    assert isinstance(home, nn.Parameter)
    assert (tuple(home.shape), home.dtype, home.requires_grad, home.is_leaf) == ((6, 4), torch.float32, True, True)
    assert home.local.data_ptr() == home.detach().local.data_ptr()  # type: ignore[attr-defined]


def test_printing_talks_to_nobody() -> None:
    away = HomeTensor(torch.zeros(2, 4), home_layout(CUT, (6, 4), 1, 2))
    assert repr(away).startswith("home tensor: of shape (6, 4), rows 4 to 5 of 6 here\ntensor(")
    assert "PendingNorm(order=2.0, not summed over the ranks yet" in repr(away.norm())
    assert f"{parameter().norm():.2f}" == "65.76"


def test_a_list_of_gradients_asks_once_how_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[HomeTensor] = []
    monkeypatch.setattr(OPS.reads, "expression", asked.append)
    homes = [HomeTensor(torch.ones(2, 4), home_layout(CUT, (6, 4), 1, 2)) for _ in range(3)]
    assert _norm_readings(homes, torch.ones(3), 2.0, None) == []
    assert asked == homes[:1]


def test_a_list_of_parameters_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(keep=lambda read, part: kept.append((read, part)))
    kept: list[Any] = []
    monkeypatch.setattr(OPS.reads, "expression", lambda home: (run, "named"))
    homes = [HomeTensor(torch.ones(2, 4), home_layout(CUT, (6, 4), 1, 2)) for _ in range(2)]
    read = "named", ("norm", 2.0, "torch.float32")
    assert _norm_readings(homes, torch.tensor([3.0, 4.0]), 2.0, None) == [(run, read)] * 2
    assert [(what, part.item()) for what, part in kept] == [(read, 3.0), (read, 4.0)]


def test_a_piece_of_another_shape_is_refused() -> None:
    with pytest.raises(StateError, match=r"owns a piece of shape \(4, 4\).*got a piece of shape \(6, 4\)"):
        HomeTensor(torch.zeros(6, 4), home_layout(CUT, (6, 4), 0, 2))
    with pytest.raises(StateError, match="cannot be cut from"):
        HomeTensor.from_full(torch.zeros(4, 6), ALONE)


def test_pickles_hold_plain_tensors() -> None:
    home = parameter()
    buffer = io.BytesIO()
    torch.save({"w": home.detach()}, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer)["w"]) is torch.Tensor
    assert type(pickle.loads(pickle.dumps(home))) is nn.Parameter
    assert torch.equal(pickle.loads(pickle.dumps(home)), torch.arange(24.0).view(6, 4))


def test_one_process_shares_its_memory_as_any_tensor() -> None:
    home = parameter().detach()
    home.numpy()[0, 0] = 7
    assert home.data_ptr() == home.local.data_ptr()  # type: ignore[attr-defined]
    assert (home.tolist()[0], home.sum().item()) == ([7.0, 1.0, 2.0, 3.0], 283.0)
    assert home.share_memory_().is_shared()


def test_deep_copies_share_nothing_but_the_layout() -> None:
    home = parameter()
    copied = copy.deepcopy(nn.ParameterDict({"w": home}))["w"]
    assert isinstance(copied, nn.Parameter)
    assert copied.home_layout is home.home_layout  # type: ignore[attr-defined]
    with torch.no_grad():
        copied.zero_()
    assert home.sum() == 276
    with pytest.raises(StateError, match="leaves of autograd"):
        copy.deepcopy(home * 2)


def test_setting_data_swaps_the_piece() -> None:
    home = parameter()
    home.data = torch.ones(6, 4)
    assert home.sum() == 24
    home.data = home.data.double()
    assert (home.dtype, home.local.dtype) == (torch.float64, torch.float64)  # type: ignore[attr-defined]


def test_modules_convert_home_parameters() -> None:
    module = nn.Linear(4, 6)
    module.weight = parameter()
    module.bfloat16()
    assert isinstance(module.weight, HomeTensor)
    assert module.weight.dtype == module.weight.local.dtype == torch.bfloat16  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_every_write_is_counted(options: dict[str, bool]) -> None:
    home = parameter()
    home.grad = torch.ones_like(home)
    optimizer = torch.optim.AdamW([home], **options)  # type: ignore[arg-type]
    before = (home._version, home.local._version)  # type: ignore[attr-defined]
    optimizer.step()
    assert home._version > before[0]
    assert home.local._version > before[1]  # type: ignore[attr-defined]
    before = (home._version, 0)
    home.data.copy_(torch.zeros(6, 4))
    assert home._version > before[0]


def test_a_swap_never_turns_the_version_back() -> None:
    home = parameter()
    versions = []
    for _ in range(3):
        home.data = torch.zeros(6, 4)
        versions.append((home._version, home.local._version))  # type: ignore[attr-defined]
    assert versions == sorted(set(versions))


def test_gradients_are_zeroed_in_place_or_dropped() -> None:
    home = parameter()
    home.grad = torch.ones_like(home)
    optimizer = torch.optim.SGD([home], lr=0.1, foreach=True)
    optimizer.zero_grad(set_to_none=False)
    assert home.grad.sum() == 0
    optimizer.zero_grad()
    assert home.grad is None


def test_averaged_models_follow() -> None:
    module = nn.Linear(4, 6, bias=False)
    module.weight = parameter()
    averaged = torch.optim.swa_utils.AveragedModel(module)
    for scale in (1.0, 3.0):
        with torch.no_grad():
            module.weight.fill_(scale)
        averaged.update_parameters(module)
    assert torch.equal(averaged.module.weight, torch.full((6, 4), 2.0))


def test_norms_wait_to_be_read_together() -> None:
    norms = [parameter().detach().norm() for _ in range(3)]
    assert all(type(norm) is PendingNorm for norm in norms)
    stacked = torch.stack(norms)
    assert type(stacked) is torch.Tensor
    assert torch.equal(stacked, torch.arange(24.0).norm().expand(3))
    assert type(copy.deepcopy(norms[1])) is type(pickle.loads(pickle.dumps(norms[1]))) is torch.Tensor
    assert norms[0].numpy() == norms[0].tolist() == float(norms[0])


def test_a_world_of_one_sees_its_own_memory() -> None:
    home = parameter()
    with torch.no_grad():
        home[0].zero_()
        home.view(-1)[1] = 5.0
    assert home.full_tensor()[0].tolist() == [0, 5, 0, 0]


def test_resizing_is_refused() -> None:
    with torch.no_grad(), pytest.raises(StateError, match=r"assign p\.data"):
        parameter().detach().resize_(3, 3)


def test_new_tensors_of_the_global_shape_are_home() -> None:
    home = parameter()
    assert isinstance(torch.randn_like(home), HomeTensor)
    assert isinstance(home.new_zeros(6, 4), HomeTensor)
    assert not isinstance(home.new_zeros(6), HomeTensor)
    assert isinstance(torch.empty_like(home, dtype=torch.float64), HomeTensor)


def test_copies_on_all_ranks_need_no_messages() -> None:
    both = home_layout(Annotation.on((0, 1), Duplicate(2)), (6, 4), 1, 2)
    home = HomeTensor.from_full(torch.ones(6, 4), both)
    assert both.is_whole_everywhere
    assert home.full_tensor().data_ptr() == home.local.data_ptr()


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW])
def test_numbers_that_an_optimizer_keeps_stay_numbers_though_the_parameter_is_one_too(
    make: type[torch.optim.Optimizer],
) -> None:
    whole = home_layout(Annotation.on((0,)), (), 0, 1)
    plain, home = nn.Parameter(torch.tensor(2.0)), nn.Parameter(HomeTensor.from_full(torch.tensor(2.0), whole))
    optimizers = [make([parameter]) for parameter in (plain, home)]  # type: ignore[call-arg]
    plain.grad = torch.tensor(1.0)
    optimizers[0].step()
    optimizers[1].state[home] = {key: copy.deepcopy(value) for key, value in optimizers[0].state[plain].items()}
    cut_optimizer_state(optimizers[1])
    moved = {key for key, value in optimizers[1].state[home].items() if isinstance(value, HomeTensor)}
    assert moved == {"exp_avg", "exp_avg_sq", "ax"} & optimizers[0].state[plain].keys()
    with torch.no_grad():
        home.copy_(plain)
    for parameter in (plain, home):
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    assert home.detach().full_tensor() == plain  # type: ignore[attr-defined]


def test_norms_of_complex_pieces_are_real_as_those_of_tensors() -> None:
    whole = torch.complex(torch.arange(24.0), 1.0 - torch.arange(24.0)).view(6, 4)
    home = HomeTensor.from_full(whole.clone(), ALONE)
    for found, expected in (
        (torch._foreach_norm([home])[0], torch._foreach_norm([whole])[0]),
        (home.norm(), whole.norm()),
        (torch.nn.utils.get_total_norm([home]), whole.norm()),
    ):
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found + 0, expected)
    torch.testing.assert_close(home.sum() + 0, whole.sum())
