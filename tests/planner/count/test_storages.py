import gc

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hetu_fx.planner.count.storages import Storages


def test_views_and_results_in_place_hold_nothing_new() -> None:
    with Storages("me") as storages:
        x = torch.zeros(4, 2)
        y = x.view(8).add_(1)
    assert [change.bytes for change in storages.changes()] == [32]
    assert y.data_ptr() == x.data_ptr()


def test_a_storage_goes_with_its_last_tensor_and_keeps_its_owner() -> None:
    with Storages("first") as storages:
        x = torch.zeros(3)
        view = x[1:]
        storages.owner = "second"
        del x
        y = torch.ones(1)
        del view
    assert [(c.bytes, c.owner, c.during) for c in storages.changes()] == [
        (12, "first", "first"),
        (4, "second", "second"),
        (-12, "first", "second"),
    ]
    assert y.item() == 1


def test_what_is_ignored_is_left_out_even_later() -> None:
    x = torch.zeros(2)
    with Storages(0) as storages:
        storages.ignore([x])
        gradient = x + 1
        result = gradient * 2
    storages.ignore([gradient])
    assert [change.bytes for change in storages.changes()] == [8]
    assert storages.numbers([result]) == {storages.changes()[0].storage}


def test_tensors_without_data_are_counted_alike() -> None:
    with FakeTensorMode(), Storages(0) as storages:
        x = torch.zeros(5, requires_grad=True)
        (x * 2).exp().sum().backward()
        del x
    gc.collect()
    assert sum(change.bytes for change in storages.changes()) == 0
    assert max(change.bytes for change in storages.changes()) == 20
