"""Models on the meta device on two gloo ranks, by the one line: from a folder, from rank 0, and back to a folder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

import hetu_fx
from hetu_fx.checkpoint.summed_files import SummedWriter
from hetu_fx.errors import HetuFxError
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.home.ops import HomeTensor
from tests.model_zoo import SAMPLES, gpt2, llama

WORLD = 2
torch.manual_seed(3)  # the same on all ranks
BATCH = SAMPLES["llama"].batch(4, 16)
UNEVEN = Plan.data_parallel((0, 1), (1, 3))


def whole_model(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return llama(tie_word_embeddings=True)


def empty_model() -> Any:
    with torch.device("meta"):
        return llama(tie_word_embeddings=True)


def shared_folder(rank: int, folder: Path) -> Path:
    """Return a folder with the weights, which rank 0 writes."""
    place = folder / "weights"
    if rank == 0 and not place.exists():
        whole_model().save_pretrained(place, max_shard_size="20KB")
    dist.barrier()
    return place


def check_a_folder_is_read_trained_and_saved_for_from_pretrained(rank: int, world: int, folder: Path) -> None:
    place, model = shared_folder(rank, folder), empty_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hetu_fx.auto_parallelize(model, BATCH, plan=UNEVEN, data="global", weights=place, optimizer=optimizer)
    plain = type(model).from_pretrained(place)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        losses = [model(**BATCH).loss, plain(**BATCH).loss]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for loss, one in zip(losses, (optimizer, reference), strict=True):
            loss.backward()
            one.step()
            one.zero_grad()
    model.hetu.save(folder / "saved", max_shard_size="20KB")
    again = type(model).from_pretrained(folder / "saved")
    for (name, own), trained in zip(again.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, trained, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(own, model.get_parameter(name).full_tensor()), name


def check_one_line_plans_for_a_model_without_values(rank: int, world: int, folder: Path) -> None:
    place, model = shared_folder(rank, folder), empty_model()
    hetu_fx.auto_parallelize(model, BATCH, data="global", weights=place)
    plain = whole_model()
    for name, own in model.named_parameters():
        assert torch.equal(own.full_tensor(), plain.get_parameter(name)), name


def check_values_are_those_of_rank_0_where_the_others_have_none(rank: int, world: int, folder: Path) -> None:
    model = whole_model() if rank == 0 else empty_model()
    hetu_fx.auto_parallelize(model, BATCH, plan=UNEVEN, data="global", device="cpu")
    plain = whole_model()
    torch.testing.assert_close(model(**BATCH).loss, plain(**BATCH).loss, rtol=1e-5, atol=0)
    for name, own in model.named_parameters():
        assert isinstance(own, HomeTensor)
        assert torch.equal(own.full_tensor(), plain.get_parameter(name)), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name


def check_an_initialisation_is_the_same_as_on_one_rank(rank: int, world: int, folder: Path) -> None:
    torch.manual_seed(7 + rank)  # rank 0's counts
    model = empty_model()
    hetu_fx.auto_parallelize(model, BATCH, plan=UNEVEN, data="global", weights="init")
    wholes = {name: own.full_tensor() for name, own in model.named_parameters()}
    group = dist.new_group([0])
    if rank == 0:
        alone = hetu_fx.auto_parallelize(
            empty_model(), BATCH, plan=Plan.single(), weights="init", seed=7, process_group=group
        )
        for name, own in alone.named_parameters():
            assert torch.equal(own.detach(), wholes[name]), name
    dist.barrier()


@contextmanager
def one_whole_at_a_time() -> Iterator[None]:
    """Fail where a large tensor is still there when the next one is written."""
    write, alive, wholes = SummedWriter.write, list[int](), list[weakref.ref[Tensor]]()

    def counted(writer: SummedWriter, tensor: Tensor) -> None:
        alive.append(sum(known() is not None for known in wholes))
        if tensor.numel() > 1000:  # of smaller ones the rank may own all
            wholes.append(weakref.ref(tensor))
        write(writer, tensor)

    with mock.patch.object(SummedWriter, "write", counted):
        yield
    assert wholes
    assert not any(alive)


def check_one_rank_alone_saves_a_tensor_at_a_time(rank: int, world: int, folder: Path) -> None:
    place, model = shared_folder(rank, folder), empty_model()
    hetu_fx.auto_parallelize(model, BATCH, plan=UNEVEN, data="global", weights=place)
    if rank == 0:
        with one_whole_at_a_time():
            model.save_pretrained(folder / "alone")
        assert (folder / "alone" / "config.json").exists()
        again = type(model).from_pretrained(folder / "alone")
        for name, own in whole_model().named_parameters():
            assert torch.equal(again.get_parameter(name), own), name
        assert again.lm_head.weight is again.model.embed_tokens.weight
    dist.barrier()


@contextmanager
def accelerator_of(rank: int, world: int) -> Iterator[Accelerator]:
    """Give an accelerator as a launched process has it."""
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in launched.items()}):
        try:
            yield Accelerator(cpu=True)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def check_accelerate_saves_a_tensor_at_a_time(rank: int, world: int, folder: Path) -> None:
    place, model = shared_folder(rank, folder), empty_model()
    hetu_fx.auto_parallelize(model, BATCH, plan=UNEVEN, data="global", weights=place)
    with accelerator_of(rank, world) as accelerator:
        model = accelerator.prepare(model)
        with one_whole_at_a_time() if rank == 0 else nullcontext():
            accelerator.save_model(model, folder / "model", max_shard_size="40KB")
            accelerator.save_state(str(folder / "state"))
        accelerator.wait_for_everyone()
        again = whole_model(seed=2)
        load_checkpoint_in_model(again, folder / "model")
        saved = load_file(folder / "state" / "model.safetensors")
        for name, own in whole_model().named_parameters():
            assert torch.equal(again.get_parameter(name), own), name
            assert torch.equal(saved[name], own), name
        assert len(list((folder / "model").glob("*.safetensors"))) > 1


def check_what_is_wrong_on_one_rank_is_raised_on_both(rank: int, world: int, folder: Path) -> None:
    place = (shared_folder(rank, folder), folder / "nowhere")[rank]
    with pytest.raises(HetuFxError) as raised:
        hetu_fx.auto_parallelize(empty_model(), BATCH, plan=UNEVEN, data="global", weights=place)
    assert "there are no weights at" in str(raised.value)
    with pytest.raises(HetuFxError, match="is on the meta device and has no values"):
        hetu_fx.auto_parallelize(empty_model(), BATCH, plan=UNEVEN, data="global")
    model = whole_model() if rank else empty_model()
    with pytest.raises(HetuFxError, match=r"is on the meta device|have values already"):
        hetu_fx.auto_parallelize(model, BATCH, plan=UNEVEN, data="global")


def check_a_model_with_other_names_is_refused(rank: int, world: int, folder: Path) -> None:
    with torch.device("meta"):
        other = gpt2()
    with pytest.raises(HetuFxError, match=r"is of another model: missing in the file \[transformer.h.0"):
        hetu_fx.auto_parallelize(other, BATCH, plan=UNEVEN, data="global", weights=shared_folder(rank, folder))


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_two_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD, 280)[name] if report]
    assert not failures, "\n".join(failures)
