"""What one device does alone; that something is found, not how fast it is."""

import pytest
import torch

from hetu_fx.cluster.device_speed import matmul_flops_per_second, memory_bytes_per_second, op_seconds


@pytest.mark.parametrize("measure", [matmul_flops_per_second, memory_bytes_per_second, op_seconds])
def test_a_figure_is_always_found(measure) -> None:
    assert measure("cpu", 0.0) > 0


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_what_an_op_takes_is_found_whatever_surrounds_the_call(around) -> None:
    with around():
        assert op_seconds("cpu", 0.0) > 0
