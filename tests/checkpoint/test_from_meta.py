"""Models on the meta device become parallel: values, bytes that each rank reads, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hetu_fx
from hetu_fx import api
from hetu_fx.base.device_types import HOST
from hetu_fx.base.per_rank import own
from hetu_fx.check.checker import Checker
from hetu_fx.checkpoint.from_meta import awaiting_values
from hetu_fx.checkpoint.summed_files import SummedFile
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import CheckpointError, HetuFxError, StateError
from hetu_fx.lockstep import RankShard, join_pieces
from hetu_fx.plans.plan import Plan
from hetu_fx.prepare import check_plans_and_choose_homes, make_runtime
from hetu_fx.program.captures import Programs
from hetu_fx.switching.graph_execution import GraphExecution
from hetu_fx.switching.home.ops import HomeTensor
from hetu_fx.switching.runtime import Runtime
from hetu_fx.switching.settings import Settings
from tests.model_zoo import SAMPLES, ConvNet, bert, gpt2, llama, vit

META = torch.device("meta")
SHARES = {"even": (1.0, 1.0), "3:1": (3.0, 1.0), "alone": (1.0,)}


def on_meta(make: Callable[..., nn.Module], **changes: Any) -> nn.Module:
    with META:
        return make(**changes)


def saved(make: Callable[..., Any], folder: Path, **changes: Any) -> Any:
    """Save a model as transformers do, in several files, and return it."""
    torch.manual_seed(1)
    model = make(**changes)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def start(
    model: nn.Module, weights: Any, table: GroupTable, shares: Sequence[float], batch: Any, seed: int = 5
) -> Runtime:
    """Make a model parallel as a rank of replicas with homes by these shares."""
    table.know_types(["cpu"] * table.size)
    table.connect(HOST)
    plan = Plan.data_parallel(range(table.size), tuple(range(1, table.size + 1)))
    cluster = Cluster.on_paper([1e9 * share for share in shares])
    with awaiting_values(model, weights, HOST, lambda: seed, table) as arrive:
        execution = GraphExecution(Programs(model, None), batch, None)
        with using(table):
            layouts = check_plans_and_choose_homes((plan,), model, execution, cluster, table)
        settings = Settings(shared=True, outputs="auto", seed=0)
        return make_runtime(model, None, table, execution, (plan,), layouts, settings, arrive)


def pieces(runtime: Runtime) -> dict[str, RankShard]:
    return {name: RankShard.of(tensor) for name, tensor in runtime.homes.items()}


def state(make: Callable[..., nn.Module], weights: Any, shares: Sequence[float], batch: Any) -> dict[str, Tensor]:
    """Return the parameters that all ranks have together."""

    def work(table: GroupTable) -> dict[str, RankShard]:
        return pieces(start(on_meta(make), weights, table, shares, batch))

    return join_pieces(run_in_threads(len(shares), work))


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_values_are_those_of_a_model_that_is_loaded_whole(tmp_path: Path, name: str, shares: str) -> None:
    sample = SAMPLES[name]
    whole = saved(sample.model, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    found = state(sample.model, str(tmp_path), SHARES[shares], sample.batch(4, 16))
    loaded = dict(type(whole).from_pretrained(tmp_path).named_parameters())
    assert found.keys() == loaded.keys()
    assert all(torch.equal(found[name], loaded[name].detach()) for name in found)


@pytest.mark.parametrize("shares", ["even", "3:1"])
def test_a_rank_reads_the_bytes_that_it_owns_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: str
) -> None:
    whole = saved(llama, tmp_path, tie_word_embeddings=True)

    class Read(list[int]):
        """The bytes that a rank has read."""

    part = SummedFile.part

    def counted(self: SummedFile, name: str, where: tuple[slice, ...]) -> Tensor:
        found = part(self, name, where)
        own(Read).append(found.nbytes)
        return found

    monkeypatch.setattr(SummedFile, "part", counted)

    def work(table: GroupTable) -> tuple[int, int]:
        runtime = start(on_meta(llama, tie_word_embeddings=True), tmp_path, table, SHARES[shares], BATCH)
        owned = sum(home.local.nbytes for home in runtime.homes.values() if isinstance(home, HomeTensor))
        return sum(own(Read)), owned

    found = run_in_threads(2, work)
    total = sum(parameter.nbytes for parameter in whole.parameters())
    assert all(read == owned for read, owned in found)
    assert sum(read for read, _ in found) == total
    share = SHARES[shares][0] / sum(SHARES[shares])
    assert found[0][0] == pytest.approx(share * total, rel=0.02)


BATCH = SAMPLES["llama"].batch(4, 16)


def trained(runtime: Runtime, batch: Any) -> tuple[list[float], dict[str, RankShard]]:
    optimizer = torch.optim.AdamW(runtime.homes.values(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = runtime.run((), dict(batch)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, pieces(runtime)


@pytest.mark.parametrize("shares", ["even", "3:1"])
def test_training_is_that_of_the_same_model_made_whole_bit_for_bit(tmp_path: Path, shares: str) -> None:
    whole = saved(llama, tmp_path, dtype=torch.float64)

    def from_folder(table: GroupTable) -> Any:
        model = on_meta(llama).double()
        return trained(start(model, tmp_path, table, SHARES[shares], BATCH), BATCH)

    def made_whole(table: GroupTable) -> Any:
        return trained(start(copy.deepcopy(whole).double(), None, table, SHARES[shares], BATCH), BATCH)

    (losses, state), (expected, wanted) = (
        (ranks[0][0], join_pieces([rank[1] for rank in ranks]))
        for ranks in (run_in_threads(2, work) for work in (from_folder, made_whole))
    )
    assert losses == expected
    assert losses[2] < losses[0]
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_numbers_are_cast_to_the_dtype_of_the_model(tmp_path: Path, stored: str, wanted: str) -> None:
    torch.manual_seed(1)
    whole: Any = llama().to(getattr(torch, stored))
    whole.save_pretrained(tmp_path)
    dtype = getattr(torch, wanted)
    found = state(lambda: llama().to(dtype), tmp_path, (1.0, 1.0), BATCH)
    assert all(torch.equal(found[name], own.detach().to(dtype)) for name, own in whole.named_parameters())


def test_one_file_and_an_index_may_be_named(tmp_path: Path) -> None:
    whole = saved(llama, tmp_path / "many")
    save_file(dict(whole.state_dict()), tmp_path / "any name.safetensors")
    for given in ("many/model.safetensors.index.json", "any name.safetensors"):
        found = state(llama, tmp_path / given, (1.0, 1.0), BATCH)
        assert all(torch.equal(found[name], own.detach()) for name, own in whole.named_parameters())


def test_one_file_counts_before_an_index_that_an_earlier_save_has_left(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    torch.manual_seed(2)
    whole: Any = llama()
    whole.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    found = state(llama, tmp_path, (1.0, 1.0), BATCH)
    assert all(torch.equal(found[name], own.detach()) for name, own in whole.named_parameters())


def test_weights_without_the_head_s_prefix_are_found(tmp_path: Path) -> None:
    whole = saved(gpt2, tmp_path / "head")
    whole.transformer.save_pretrained(tmp_path / "base")
    found = state(gpt2, tmp_path / "base", (1.0, 1.0), SAMPLES["gpt2"].batch(4, 16))
    assert all(torch.equal(found[name], own.detach()) for name, own in whole.named_parameters())


def test_buffers_are_computed_by_their_modules(tmp_path: Path) -> None:
    whole = saved(llama, tmp_path)

    def work(table: GroupTable) -> dict[str, Tensor]:
        model = on_meta(llama)
        start(model, tmp_path, table, (1.0, 1.0), BATCH)
        return dict(model.named_buffers())

    for buffers in run_in_threads(2, work):
        assert buffers.keys() == dict(whole.named_buffers()).keys()
        assert buffers
        assert all(torch.equal(buffers[name], own) for name, own in whole.named_buffers())


def test_buffers_that_are_saved_come_from_the_file(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = ConvNet()
    for _ in range(2):
        whole(**SAMPLES["conv"].batch(4, 0))  # running statistics
    save_file(whole.state_dict(), tmp_path / "model.safetensors")

    def work(table: GroupTable) -> dict[str, Tensor]:
        model = on_meta(ConvNet)
        start(model, tmp_path, table, (1.0, 1.0), SAMPLES["conv"].batch(4, 0))
        return dict(model.named_buffers())

    for buffers in run_in_threads(2, work):
        assert all(torch.equal(buffers[name], own) for name, own in whole.named_buffers())


@pytest.mark.parametrize("make", [llama, gpt2, bert, vit, ConvNet])
def test_an_initialisation_gives_the_same_values_however_homes_are_cut(make: Callable[..., nn.Module]) -> None:
    name = "conv" if make is ConvNet else make.__name__
    batch = SAMPLES[name].batch(6, 16)
    alone, even, uneven = (state(make, "init", shares, batch) for shares in ((1.0,), (1.0, 1.0), (1.0, 3.0, 2.0)))
    for other in (even, uneven):
        assert alone.keys() == other.keys()
        assert all(torch.equal(alone[name], other[name]) for name in alone)


def weights_of(folder: Path, **changes: Any) -> Path:
    """Write a llama's weights, some of them changed or left out (None)."""
    torch.manual_seed(1)
    found = {**llama().state_dict(), **changes}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def refusals(weights: Any, make: Callable[..., nn.Module] = llama, batch: Any = BATCH) -> list[str]:
    """Return what each of two ranks says, once it was seen that the model is as it was."""

    def work(table: GroupTable) -> str:
        model = on_meta(make)
        before = {name: (id(tensor), type(tensor)) for name, tensor in model.named_parameters()}
        with pytest.raises(HetuFxError) as raised:
            start(model, weights, table, (1.0, 1.0), batch)
        assert {name: (id(tensor), type(tensor)) for name, tensor in model.named_parameters()} == before
        assert all(tensor.is_meta for tensor in model.parameters())
        return str(raised.value)

    return run_in_threads(2, work)


NORM = "model.norm.weight"


def test_weights_that_lack_a_tensor_are_refused_on_every_rank(tmp_path: Path) -> None:
    for told in refusals(weights_of(tmp_path, **{NORM: None})):
        assert f"missing in the file [{NORM}]" in told
        assert "hint:" in told


def test_weights_of_another_shape_are_refused_on_every_rank(tmp_path: Path) -> None:
    for told in refusals(weights_of(tmp_path, **{NORM: torch.zeros(7)})):
        assert f"{NORM}: (7,) torch.float32 in the file, (48,) torch.float32 here" in told
        assert "hint:" in told


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    for told in refusals(weights_of(tmp_path, **{NORM: torch.zeros(48, dtype=torch.int64)})):
        assert f"{NORM}: (48,) torch.int64 in the file, (48,) torch.float32 here" in told


def test_numbers_of_one_byte_which_have_scales_beside_them_are_no_weights(tmp_path: Path) -> None:
    low = torch.zeros(48).to(torch.float8_e4m3fn)
    for told in refusals(weights_of(tmp_path, **{NORM: low})):
        assert f"{NORM}: (48,) torch.float8_e4m3fn in the file, (48,) torch.float32 here" in told


def test_torn_weights_are_refused_on_every_rank(tmp_path: Path) -> None:
    file = weights_of(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for told in refusals(tmp_path):
        assert f"cannot read {file}" in told
        assert "hint: it is torn" in told


def test_a_tensor_that_is_named_twice_is_refused_on_every_rank(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][NORM])
    tensors = load_file(tmp_path / other)
    save_file({**tensors, NORM: torch.zeros(48)}, tmp_path / other, metadata={"format": "pt"})
    for told in refusals(tmp_path):
        assert f"holds '{NORM}' twice: in {index['weight_map'][NORM]}, as its index says, and in {other}" in told
        assert "hint:" in told
    text = json.dumps(index).replace(f'"{NORM}"', f'"{NORM}": "{other}", "{NORM}"')
    (tmp_path / "model.safetensors.index.json").write_text(text)
    for told in refusals(tmp_path):
        assert f"key '{NORM}' stands twice" in told


def test_weights_that_are_nowhere_are_refused_on_every_rank(tmp_path: Path) -> None:
    for told in refusals(tmp_path / "nothing"):
        assert f"there are no weights at {tmp_path / 'nothing'}" in told
        assert "hint:" in told
    for told in refusals(tmp_path):
        assert "holds no weights" in told


def test_a_model_on_the_meta_device_without_weights_is_refused() -> None:
    for told in refusals(None):
        assert "'model.embed_tokens.weight' is on the meta device and has no values" in told
        assert "hint: give weights='FOLDER'" in told


class Scaled(nn.Module):
    """Has a parameter that no method initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(x) * self.scale).square().mean()}


def test_what_nothing_initialises_is_named() -> None:
    for told in refusals("init", Scaled, {"x": torch.ones(6, 4)}):
        assert told.startswith("'scale' would have no value: neither Scaled.reset_parameters nor an _init_weights")
        assert "hint:" in told


class Masked(nn.Module):
    """Has a buffer that is saved nowhere, and that nothing computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layer(x) * self.mask).square().mean()}


def test_a_buffer_that_nothing_computes_is_named(tmp_path: Path) -> None:
    save_file(Masked().state_dict(), tmp_path / "model.safetensors")
    for told in refusals(tmp_path, Masked, {"x": torch.ones(6, 4)}):
        assert told.startswith("'mask' would have no value")


class Constant(Masked):
    """Has a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.mask
        self.mask = torch.ones(4)


def test_a_tensor_that_is_no_buffer_is_named(tmp_path: Path) -> None:
    save_file({name: torch.ones(tensor.shape) for name, tensor in Constant().state_dict().items()}, tmp_path / "a")
    for told in refusals(tmp_path / "a", Constant, {"x": torch.ones(6, 4)}):
        assert told.startswith("attribute 'mask' of module '' is a tensor on the meta device")


def test_a_model_that_fails_later_is_on_the_meta_device_again(tmp_path: Path) -> None:
    class Failing(Masked):
        def forward(self, x: Tensor) -> Any:
            raise ValueError("this forward runs nowhere")

    for told in refusals("init", Failing, {"x": torch.ones(6, 4)}):
        assert "'mask'" in told  # before it is captured

    class FailingWithout(Failing):
        def __init__(self) -> None:
            super().__init__()
            del self.mask

    for told in refusals("init", FailingWithout, {"x": torch.ones(6, 4)}):
        assert "this forward runs nowhere" in told


def test_weights_for_a_model_that_has_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"weights='init' is given, but the parameters have values already\nhint"):
        hetu_fx.auto_parallelize(llama(), BATCH, plan=Plan.single(), weights="init")


def test_a_device_that_the_model_is_not_on_is_refused() -> None:
    with pytest.raises(StateError, match=r"device='meta' is given, but the model is on cpu\nhint"):
        hetu_fx.auto_parallelize(llama(), BATCH, plan=Plan.single(), device="meta")


def test_other_tensors_in_the_files_are_told_of(tmp_path: Path) -> None:
    weights_of(tmp_path, other=torch.zeros(3))
    with pytest.warns(UserWarning, match=r"holds 1 tensors that the model does not have, such as 'other'"):
        hetu_fx.auto_parallelize(on_meta(llama), BATCH, plan=Plan.single(), weights=tmp_path)


def test_the_one_line_trains_a_model_of_one_process_from_a_folder(tmp_path: Path) -> None:
    whole = saved(llama, tmp_path)
    model: Any = on_meta(llama)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = hetu_fx.auto_parallelize(model, BATCH, plan=Plan.single(), weights=tmp_path, optimizer=optimizer)
    assert made is model
    loss = model(**BATCH).loss
    assert torch.equal(loss, whole(**BATCH).loss)
    loss.backward()
    optimizer.step()
    assert not torch.equal(model.lm_head.weight, whole.lm_head.weight)


def test_weights_come_with_the_first_call_where_no_batch_is_given(tmp_path: Path) -> None:
    whole = saved(llama, tmp_path)
    model: Any = hetu_fx.auto_parallelize(on_meta(llama), plan=Plan.single(), weights=tmp_path)
    assert next(model.parameters()).is_meta
    assert torch.equal(model(**BATCH).loss, whole(**BATCH).loss)


def test_a_copy_of_such_a_model_is_a_model_with_values(tmp_path: Path) -> None:
    whole = saved(llama, tmp_path)
    model: Any = hetu_fx.auto_parallelize(on_meta(llama), BATCH, plan=Plan.single(), weights=tmp_path)
    assert torch.equal(copy.deepcopy(model)(**BATCH).loss, whole(**BATCH).loss)


def test_plans_are_tried_before_there_are_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(llama, tmp_path)
    monkeypatch.setattr(api, "Checker", partial(Checker, seconds=1000.0))
    model: Any = hetu_fx.auto_parallelize(on_meta(llama), BATCH, weights=tmp_path, plan=Plan.single(), check=True)
    assert all(said.startswith("checked:") for said in model.hetu.checks.values())


def test_a_module_that_runs_as_it_is_starts_from_a_folder_too(tmp_path: Path) -> None:
    whole = saved(llama, tmp_path)
    model: Any = hetu_fx.auto_parallelize(
        on_meta(llama), BATCH, weights=tmp_path, plan=Plan.single(), capture="eager", check=False
    )
    assert torch.equal(model(**BATCH).loss, whole(**BATCH).loss)


def test_what_transformers_and_accelerate_make_without_values_starts_too(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    whole = saved(llama, tmp_path, tie_word_embeddings=True)
    with accelerate.init_empty_weights():
        first = llama(tie_word_embeddings=True)
    second = type(whole).from_pretrained(tmp_path, device_map="meta")
    for made in (first, second):
        model: Any = hetu_fx.auto_parallelize(made, BATCH, plan=Plan.single(), weights=tmp_path, device="cpu")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model(**BATCH).loss, whole(**BATCH).loss)


def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    saved(llama, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / index["weight_map"][NORM]).unlink()
    with pytest.raises(CheckpointError, match=index["weight_map"][NORM]):
        hetu_fx.auto_parallelize(on_meta(llama), BATCH, plan=Plan.single(), weights=tmp_path)
