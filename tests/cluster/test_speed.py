from hetu_fx.cluster.speed import matmul_flops_per_second


def test_a_product_is_always_timed() -> None:
    assert matmul_flops_per_second("cpu", 0.0) > 0
