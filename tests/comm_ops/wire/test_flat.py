"""Buffers of the wire: whatever a tensor is like, its memory is its values, or it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hetu_fx.comm_ops.wire.collectives import sum_all
from hetu_fx.comm_ops.wire.flat import Flat, dense, is_dense
from hetu_fx.comm_ops.wire.groups import GroupTable, using
from hetu_fx.comm_ops.wire.p2p import Tag, post
from hetu_fx.comm_ops.wire.threads import run_in_threads
from hetu_fx.errors import CommError
from tests.comm_ops.at_once import flat, gather_in_place
from tests.test_layers import MODULES

VALUES: dict[str, Callable[[], Tensor]] = {
    "a column": lambda: torch.arange(12.0).view(4, 3).narrow(1, 1, 1),
    "a transposed matrix": lambda: torch.arange(6.0).view(2, 3).t(),
    "one value seen often": lambda: torch.tensor(3.0).expand(4),
    "conjugated when read": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated when read": lambda: torch._neg_view(torch.arange(3.0)),
    "imaginary parts of conjugates": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "every other": lambda: torch.arange(8)[::2],
}
DENSE: dict[str, Callable[[], Tensor]] = {
    "no dim": lambda: torch.tensor(2.0),
    "no entries": lambda: torch.empty(0, 3),
    "a row": lambda: torch.arange(12.0).view(4, 3).narrow(0, 1, 1),
    "truths": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([[1 + 2j], [3 - 1j]]),
    "of a graph": lambda: torch.ones(2, 2, requires_grad=True) * 2,
}
ALL = VALUES | DENSE


@pytest.mark.parametrize("name", ALL)
def test_what_is_read_has_the_tensor_s_values(name: str) -> None:
    x = ALL[name]()
    flat = Flat.of(x)
    assert torch.equal(flat.tensor, x.detach().reshape(-1))
    assert flat.as_bytes().tolist() == flat.tensor.clone().as_strided((x.numel(),), (1,)).view(torch.uint8).tolist()
    assert is_dense(dense(x))
    assert dense(x).shape == x.shape


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_tensor_gets_what_arrives(name: str) -> None:
    x = DENSE[name]()
    flat = Flat.over(x)
    flat.copy_from(Flat(torch.zeros_like(flat.tensor)))
    assert not x.any()


@pytest.mark.parametrize("name", VALUES)
def test_what_would_be_copied_gets_nothing_and_is_refused(name: str) -> None:
    with pytest.raises(CommError, match="a buffer on the wire is flat, dense and of no graph"):
        Flat.over(VALUES[name]())


def test_a_buffer_has_one_dim_and_no_graph() -> None:
    for x in (torch.zeros(2, 2), torch.zeros(2, requires_grad=True), torch.zeros(2).to_sparse()):
        with pytest.raises(CommError, match=r"but this is a tensor of shape \(2"):
            Flat(x)


def test_pieces_lie_end_to_end_and_one_alone_is_dense_too() -> None:
    table = torch.arange(12.0).view(4, 3)
    column, row = table.narrow(1, 1, 1), table[2]
    assert Flat.joined([column, row]).tensor.tolist() == [1, 4, 7, 10, 6, 7, 8]
    assert Flat.joined([column]).tensor.tolist() == [1, 4, 7, 10]
    assert Flat.joined([row]).tensor.data_ptr() == row.data_ptr()


def test_segments_are_views() -> None:
    buffer = Flat(torch.zeros(5))
    buffer.segments([2, 0, 3])[2].tensor.fill_(1)
    assert buffer.tensor.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("name", ALL)
def test_every_collective_takes_it_as_it_is_read(name: str) -> None:
    x = ALL[name]()
    plain, is_truth = x.detach().clone(memory_format=torch.contiguous_format).resolve_conj(), x.dtype is torch.bool

    def work(table: GroupTable) -> None:
        with using(table), torch.no_grad():
            total = plain if is_truth else plain * 2
            assert torch.equal(flat((0, 1), table).sum(x).wait(), total)
            assert torch.equal(flat((0, 1), table).scatter([x, x]).wait(), total)
            assert all(torch.equal(part, plain) for part in flat((0, 1), table).gather(x, [x.shape] * 2).wait())
            buffer = Flat(plain.reshape(-1).clone())
            sum_all(buffer, (0, 1)).wait()
            assert torch.equal(buffer.tensor.view(plain.shape), total)
            both = torch.cat([plain.reshape(-1)] * 2) * (1 - table.rank)
            gather_in_place(both, [plain.numel()] * 2, (0, 1)).wait()
            assert torch.equal(both[: plain.numel()], plain.reshape(-1))

    run_in_threads(2, work)


def test_a_message_that_would_arrive_in_a_copy_is_refused() -> None:
    def work(table: GroupTable) -> None:
        x = torch.zeros(4, 3)
        with pytest.raises(CommError, match=r"shape \(4, 1\), strides \(3, 1\)"):
            post([(1 - table.rank, x.narrow(1, 0, 1), Tag.SLICES)], (), table)

    run_in_threads(2, work)


def test_nobody_else_makes_dense_tensors_for_the_wire() -> None:
    making = {
        name
        for name, path in MODULES.items()
        if name.startswith(("hetu_fx.comm_ops.wire", "hetu_fx.switching.bridge"))
        and re.search(r"\.contiguous\(\)|\.is_contiguous\(\)|detach\(\)\.(view|reshape)\(-1\)", path.read_text())
    }
    assert making <= {"hetu_fx.comm_ops.wire.flat"}
