"""Parts along one dim exchanged for parts along another on three gloo ranks, of all sizes, some empty."""

import pytest
import torch

from hetu_fx.comm_ops.ops.table import COMM_OPS

PARTS = [((5, 2, 4), (1, 2, 3)), ((0, 7, 1), (4, 1, 1)), ((1, 1, 1), (2, 0, 4))]


def check_parts(rank, world, folder):
    for sizes, heads in PARTS:
        torch.manual_seed(0)
        whole = torch.randn(2, 2 * sum(heads), sum(sizes), 3, dtype=torch.float64)
        back = torch.randn_like(whole)
        cut = [2 * head for head in heads]
        mine = whole.split(sizes, 2)[rank].clone().requires_grad_()
        found = COMM_OPS["all_to_all"].overload(mine, [0, 1, 2], 1, list(heads), 1, 2, 2, list(sizes), 1, 1)
        assert torch.equal(found, whole.split(cut, 1)[rank])
        found.backward(back.split(cut, 1)[rank])
        assert torch.equal(mine.grad, back.split(sizes, 2)[rank])


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_each_rank_gets_its_part_of_the_other_dim_and_the_gradient_comes_back(gloo_checks):
    assert gloo_checks(__file__, 3)["check_parts"] == [None] * 3
