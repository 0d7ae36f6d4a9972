"""Who asks a home tensor for memory gets the whole: gathered then, once, and kept no longer than it is of use."""

from __future__ import annotations

import gc
import io
import pickle
from weakref import ref

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from hetu_fx.annotations.annotation import Annotation, Split
from hetu_fx.switching.home.memory import drop_cached_full_tensors
from hetu_fx.switching.home.ops import HomeTensor, home_layout
from hetu_fx.switching.home.tensor import OPS

CUT = home_layout(Annotation.on((0, 1), Split(0, (2, 1))), (6, 4), 0, 2)
WHOLE = torch.arange(24.0).view(6, 4)


class Gathered(list["ref[Tensor]"]):
    """The wholes that have been gathered, one for each time."""

    @property
    def number_there(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Gathered:
    found = Gathered()

    def read(home: HomeTensor) -> Tensor:
        whole = WHOLE * home.local[0, 1]  # 1 as it was cut
        found.append(ref(whole))
        return whole

    monkeypatch.setattr(OPS.reads, "whole", read)
    return found


def model(number: int = 3) -> nn.Module:
    return nn.ParameterList([nn.Parameter(HomeTensor.from_full(WHOLE, CUT)) for _ in range(number)])


def test_a_state_dict_gathers_nothing_until_it_is_read(gathered: Gathered) -> None:
    state = model().state_dict()
    assert not gathered
    assert state["0"].numpy().tolist() == WHOLE.tolist()
    assert len(gathered) == 1


def test_a_torch_save_keeps_the_wholes_of_what_is_saved_as_long_as_the_state_dict(gathered: Gathered) -> None:
    made = model()
    state = made.state_dict()
    torch.save(state, io.BytesIO())
    assert len(gathered) == gathered.number_there == 3
    torch.save(state, io.BytesIO())
    assert len(gathered) == 3
    del state
    assert gathered.number_there == 0


def test_safetensors_gather_each_tensor_once(gathered: Gathered) -> None:
    state = model().state_dict()
    save(dict(state))
    assert len(gathered) == 3
    del state
    assert gathered.number_there == 0


def test_arrays_and_lists_keep_nothing(gathered: Gathered) -> None:
    state = model().state_dict()
    for value in state.values():
        assert value.detach().numpy().sum() == WHOLE.sum()
        assert value.tolist() == WHOLE.tolist()
    assert gathered.number_there == 0


def test_pickled_parameters_keep_nothing(gathered: Gathered) -> None:
    made = model()
    assert torch.equal(pickle.loads(pickle.dumps(made[0])), WHOLE)
    assert gathered.number_there == 0


def test_what_a_pointer_into_a_parameter_leads_to_stays_until_the_next_step(gathered: Gathered) -> None:
    made = model()
    address = made[0].data_ptr()
    assert made[0].data_ptr() == address
    assert gathered.number_there == 1
    drop_cached_full_tensors(made.parameters())
    assert gathered.number_there == 0


def test_what_has_been_written_is_gathered_again(gathered: Gathered) -> None:
    value = model().state_dict()["0"]
    before = value.data_ptr()
    assert value.untyped_storage().data_ptr() == before
    value.mul_(2)
    assert value.tolist() == (WHOLE * 2).tolist()
    assert len(gathered) == 2


def test_names_of_one_piece_share_the_whole(gathered: Gathered) -> None:
    made = model(1)
    first, second = made[0].detach(), made[0].detach()
    assert first.data_ptr() == second.data_ptr()
    assert len(gathered) == 1


def test_arrays_of_what_is_held_in_part_are_read_only(gathered: Gathered) -> None:
    value = model().state_dict()["0"]
    assert not value.numpy().flags.writeable
    with pytest.raises(RuntimeError, match="requires grad"):
        model()[0].numpy()
