"""torch.distributed.checkpoint reads what is saved, and its Hugging Face files start a model, on two gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

import hetu_fx
from hetu_fx.plans.plan import Plan
from tests.model_zoo import SAMPLES, llama

WORLD = 2
torch.manual_seed(3)  # the same on all ranks
BATCH = SAMPLES["llama"].batch(4, 16)


def parallel(seed: int, shares: tuple[int, int]) -> Any:
    torch.manual_seed(seed)
    return hetu_fx.auto_parallelize(llama(), BATCH, plan=Plan.data_parallel((0, 1), shares), data="global")


def check_torch_reads_what_was_saved_into_other_homes(rank: int, world: int, folder: Path) -> None:
    saved = parallel(1, (1, 3))
    saved.hetu.save(folder / "ours", max_shard_size="20KB")
    read = parallel(2, (2, 1))
    dcp.load(dict(read.state_dict()), storage_reader=HuggingFaceStorageReader(str(folder / "ours")))
    for name, own in saved.named_parameters():
        assert torch.equal(own.full_tensor(), read.get_parameter(name).full_tensor()), name


def check_a_model_starts_from_what_torch_has_written(rank: int, world: int, folder: Path) -> None:
    saved, place = parallel(1, (1, 3)), folder / "torch's"
    state = dict(saved.state_dict())
    files = dict.fromkeys(state, 1)
    writer = HuggingFaceStorageWriter(
        str(place), fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer)
    dist.barrier()
    with torch.device("meta"):
        model: Any = llama()
    hetu_fx.auto_parallelize(
        model, BATCH, plan=Plan.data_parallel((0, 1), (2, 1)), data="global", weights=written_file(place)
    )
    for name, own in saved.named_parameters():
        assert torch.equal(own.full_tensor(), model.get_parameter(name).full_tensor()), name


def written_file(place: Path) -> Path:
    """Return the one consolidated file that torch has written."""
    (found,) = place.glob("*.safetensors")
    return found


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in globals() if name.startswith("check_")])
def test_on_two_ranks(name: str, gloo_checks: Any) -> None:
    failures = [report for report in gloo_checks(__file__, WORLD, 280)[name] if report]
    assert not failures, "\n".join(failures)
