"""Parts of a dim exchanged for parts of other sizes on three gloo ranks, some empty, and one factor of a dim."""

import pytest
import torch

from hetu_fx.comm_ops.ops.table import COMM_OPS

PARTS = [((5, 2, 4), (1, 2, 8)), ((0, 7, 1), (4, 0, 4)), ((1, 1, 1), (1, 1, 1)), ((6, 0, 0), (0, 0, 6))]


def check_parts(rank, world, folder):
    for sizes, parts in PARTS:
        torch.manual_seed(0)
        whole = torch.randn(3, 2, sum(sizes), 2, dtype=torch.float64)  # a dim of three factors, of which one is cut
        back = torch.randn_like(whole)

        def part(tensor, of, here=rank):
            return tensor.split(of, 2)[here].reshape(3, -1)

        mine = part(whole, sizes).clone().requires_grad_()
        found = COMM_OPS["repartition"].overload(mine, [0, 1, 2], 1, list(sizes), 2, 2, list(parts))
        assert torch.equal(found, part(whole, parts))
        found.backward(part(back, parts))
        assert torch.equal(mine.grad, part(back, sizes))


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_each_rank_gets_its_part_of_other_sizes_and_the_gradient_comes_back(gloo_checks):
    assert gloo_checks(__file__, 3)["check_parts"] == [None] * 3
