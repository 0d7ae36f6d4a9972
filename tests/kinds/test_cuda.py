"""One GPU: the model trains there as without us, and everything around training works where its parameters are."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetu_fx
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.cluster.measure import matmul_flops_per_second
from hetu_fx.comm_ops.ops.ring_attention_block import KeyValueBlock, attend, gradients, merge
from hetu_fx.plans.plan import Pipeline, Stage
from hetu_fx.switching.step.timer import ComputeTimer, find_clock
from tests.model_zoo import SAMPLES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

attention = nn.functional.scaled_dot_product_attention


def model_of(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return SAMPLES[name].model(**options).to("cuda", dtype).train()


def batch_of(name: str, rows: int = 4, length: int = 11) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {key: value.cuda() for key, value in SAMPLES[name].batch(rows, length).items()}


def trained(model: nn.Module, batch: dict[str, torch.Tensor], steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_one_gpu_trains_as_the_model_does_without_us(name: str) -> None:
    model, batch = model_of(name), batch_of(name)
    model.eval()  # without dropout, whose numbers are our own
    ours = copy.deepcopy(model)
    hetu_fx.auto_parallelize(ours, batch)
    torch.testing.assert_close(trained(ours, batch), trained(model, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_trains_the_same_on_a_gpu(backend: str) -> None:
    model, batch = model_of("llama"), batch_of("llama")
    ours = copy.deepcopy(model)
    hetu_fx.auto_parallelize(ours, batch, compile=backend)
    torch.testing.assert_close(trained(ours, batch), trained(model, batch), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_step_that_is_replayed_trains_the_same(name: str, backend: str | None) -> None:
    model, batch = model_of(name).eval(), batch_of(name)
    ours = copy.deepcopy(model)
    hetu_fx.auto_parallelize(ours, batch, compile=backend, options=hetu_fx.Options(cuda_graphs=True))
    torch.testing.assert_close(trained(ours, batch, 8), trained(model, batch, 8), rtol=2e-3, atol=2e-4)
    assert launches_of_host(ours, batch) < 40 < launches_of_host(model, batch)


def launches_of_host(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Return how often the host starts something on the GPU in a forward and a backward."""
    model.zero_grad()  # or each gradient is added to one that is there
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
        model(**batch).loss.backward()
    starts = "cudaLaunchKernel", "cudaGraphLaunch", "cuLaunchKernel"
    return sum(event.name.startswith(starts) for event in record.events())


def test_a_step_that_is_recomputed_is_replayed() -> None:
    model, batch = model_of("llama").eval(), batch_of("llama")
    ours = copy.deepcopy(model)
    plan = hetu_fx.Plan((Pipeline((Stage((0,), recompute=1),)),))
    hetu_fx.auto_parallelize(ours, batch, plan=plan, options=hetu_fx.Options(cuda_graphs=True))
    torch.testing.assert_close(trained(ours, batch, 8), trained(model, batch, 8), rtol=2e-3, atol=2e-4)


def test_autocast_is_obeyed_on_a_gpu() -> None:
    model, batch = model_of("llama"), batch_of("llama")
    ours = copy.deepcopy(model)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        hetu_fx.auto_parallelize(ours, batch)
        found, expected = ours(**batch), model(**batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-3, atol=1e-3)


def test_masks_of_dropout_are_those_of_a_cpu() -> None:
    model, batch = model_of("gpt2", torch.float64), batch_of("gpt2")
    there = copy.deepcopy(model).cpu()
    on_cpu = {key: value.cpu() for key, value in batch.items()}
    hetu_fx.auto_parallelize(model, batch, seed=3)
    hetu_fx.auto_parallelize(there, on_cpu, seed=3)
    found, expected = model(**batch).loss, there(**on_cpu).loss
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_what_is_saved_on_a_gpu_is_loaded_on_a_cpu(tmp_path: Path) -> None:
    model, batch = model_of("llama"), batch_of("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    hetu_fx.auto_parallelize(model, batch, optimizer=optimizer)
    model(**batch).loss.backward()
    optimizer.step()
    model.hetu.save(tmp_path / "saved", optimizer=optimizer)
    other = SAMPLES["llama"].model()
    hetu_fx.auto_parallelize(other, {key: value.cpu() for key, value in batch.items()})
    other.hetu.load(tmp_path / "saved")
    for found, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.detach(), expected.detach().cpu())


def test_a_gpu_is_measured() -> None:
    assert matmul_flops_per_second("cuda", 0.2) > 1e12
    (device,) = Cluster.measure(device="cuda").devices
    assert device.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert device.kind == torch.cuda.get_device_name(0).lower().replace(" ", "-")


def test_time_on_a_gpu_is_that_of_its_kernels_and_not_of_their_launches() -> None:
    timer, x = ComputeTimer(find_clock(torch.device("cuda"))), torch.ones(8192, 8192, device="cuda")
    torch.mm(x, x)  # loads the kernel
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with timer:
        for _ in range(20):
            torch.mm(x, x)
    end.record()
    assert not end.query()  # the host is ahead
    torch.cuda.synchronize()
    assert timer.seconds == pytest.approx(start.elapsed_time(end) / 1e3, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
def test_attention_to_parts_of_the_keys_adds_up_on_a_gpu(dtype: torch.dtype, mask: str) -> None:
    torch.manual_seed(0)
    shapes = ((2, 4, 37, 16), (2, 2, 37, 16), (2, 2, 37, 16))
    query, key, value = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    whole = {"bool": torch.rand(37, 37) > 0.2, "additive": torch.randn(37, 37)}.get(mask)
    whole = None if whole is None else whole.cuda() if whole.dtype is torch.bool else whole.cuda().to(dtype)
    causal = mask == "causal"
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    of_mask = whole.double() if mask == "additive" else whole
    expected = attention(*exact, of_mask, is_causal=causal, enable_gqa=True)
    upstream = torch.randn_like(query)
    expected.backward(upstream.double())

    cuts = (0, 14, 37)
    parts = [
        KeyValueBlock(
            key[:, :, a:b],
            value[:, :, a:b],
            None if whole is None else whole[:, a:b],
            -a if causal else None,
        )
        for a, b in pairwise(cuts)
    ]
    out, lse = merge(attend(query, parts[0]), attend(query, parts[1]))
    found = [gradients(upstream, query, part, out, lse) for part in parts]
    limits = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
    close = {"rtol": limits[dtype], "atol": limits[dtype], "check_dtype": False}
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(found[0][0] + found[1][0], exact[0].grad, **close)
    torch.testing.assert_close(torch.cat([f[1] for f in found], 2), exact[1].grad, **close)
    torch.testing.assert_close(torch.cat([f[2] for f in found], 2), exact[2].grad, **close)
