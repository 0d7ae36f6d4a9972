"""A refusal of a forward says what that does, where, and a cure; not what torch calls things in a trace."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hetu_fx.errors import CaptureError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.tracing.meanings import explain_trace_error

Ends = Callable[["Net", Tensor, Tensor, Tensor], Tensor]
TORCHS = re.compile(
    r"\b(?:zuf|u|s)\d+\b|SymInt|SymFloat|SymBool|SymNode|FakeTensor|fake tensor|unbacked|data-dependent|functorch|"
    r"GuardOn|TORCH_LOGS|[Pp]roxy|github"
)


class Net(nn.Module):
    """A layer, and what is made of its output, labels and inputs."""

    def __init__(self, end: Ends) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(4, 4), end
        self.table, self.recurrent = nn.Embedding(9, 4, max_norm=1.0), nn.LSTM(4, 4, batch_first=True)
        self.bag = nn.EmbeddingBag(9, 4, max_norm=1.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.end(self, x, y, self.layer(x))


def branches(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return h.sum() if h.sum() > 0 else h.mean()


def counts(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return torch.stack([h.sum() for _ in range(int(y.max()))]).sum()


def as_float(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return h.sum() * float(y.max())


def maps(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return torch.func.vmap(lambda one: net.layer(one).sum())(x).sum()


def pushes(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return torch.func.jvp(net.layer, (x,), (x,))[1].sum()


def by_numpy(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return h.sum() * torch.from_numpy(np.cumsum(h.detach().numpy())).sum()


def splits(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return torch.stack([part.mean() for part in h.split([int(y.max()), 6 - int(y.max())])]).sum()


def pairs(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    kept = h[y > 0]
    return kept.mean() if len(kept) else h.sum()


def unique(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return torch.stack([h[y == label].mean() for label in y.unique()]).sum()


def narrow(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return h[: int(y.max())].sum()


def view(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return h.view(int(y.max()), -1).mean(0).sum()


def normalized(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return (h + net.table(y)).sum()


def bagged(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return (h + net.bag(y[:, None])).sum()


def packed(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    made, _ = net.recurrent(pack_padded_sequence(h[:, None].expand(-1, 5, -1), y + 1, True, enforce_sorted=False))
    return pad_packed_sequence(made, batch_first=True)[0].sum()


def packed_by_a_list(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    made, _ = net.recurrent(pack_padded_sequence(h[:, None].expand(-1, 5, -1), [5, 4, 3, 3, 2, 1], True))
    return pad_packed_sequence(made, batch_first=True)[0].sum()


def transformed(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda one: net.layer(one).square().sum()))(x).sum()


def jacobian(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return torch.func.jacrev(net.layer)(x[0]).sum() + h.sum()


def goes_backward(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    h.sum().backward()
    return h.sum()


def by_an_input(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return torch.autograd.grad(h.sum(), x)[0].sum()


def of_another_call(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return h.sum() * torch.tensor(np.asarray(h.detach().cpu()).sum())


def loops(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    while h.abs().max() > 1:
        h = h / 2
    return h.sum()


def cholesky(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    product = h @ h.t() + torch.eye(len(h))
    return torch.linalg.cholesky(product).sum() if torch.linalg.cholesky_ex(product)[1].any() else h.sum()


REFUSED = (
    branches, counts, as_float, maps, pushes, by_numpy, splits, pairs, unique, view, normalized, bagged, packed,
    packed_by_a_list, transformed, jacobian, goes_backward, by_an_input, of_another_call, loops, cholesky,
)  # fmt: skip


@pytest.mark.parametrize("end", REFUSED, ids=lambda end: end.__name__)
def test_a_refusal_says_what_the_forward_does_and_a_cure(end: Ends) -> None:
    batch = {"x": torch.randn(6, 4), "y": torch.tensor([4, 3, 2, 2, 1, 0])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CaptureError) as caught:
            capture(Net(end), batch)
    said = str(caught.value)
    assert not TORCHS.search(said), said
    assert "test_meanings.py:" in said, said
    assert "hint: " in said, said


def one_hot(net: Net, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return (h.sum() * torch.nn.functional.one_hot(y)).sum()


def test_a_one_hot_without_its_number_of_classes_is_told_to_be_given_it() -> None:
    batch = {"x": torch.randn(6, 4), "y": torch.tensor([4, 3, 2, 2, 1, 0])}
    with pytest.raises(CaptureError, match=r"test_meanings.py:\d+: it calls one_hot .*\nhint: give num_classes, "):
        capture(Net(one_hot), batch)


def test_words_of_the_forward_are_left_as_they_are() -> None:
    with pytest.raises(ValueError, match="SymInt") as caught:
        raise ValueError("u0 is no SymInt")
    assert explain_trace_error(caught.value) is None
    assert explain_trace_error(RuntimeError("Could not guard on data-dependent expression Eq(u0, 1)")) is not None
    assert explain_trace_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied (6x4 and 5x4)")) is None
