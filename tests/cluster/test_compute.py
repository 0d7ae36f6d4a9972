"""What one device does alone; that something is found, not how fast it is."""

import pytest

from hetu_fx.cluster.compute import matmul_flops_per_second, memory_bytes_per_second, op_seconds


@pytest.mark.parametrize("measure", [matmul_flops_per_second, memory_bytes_per_second, op_seconds])
def test_a_figure_is_always_found(measure) -> None:
    assert measure("cpu", 0.0) > 0
