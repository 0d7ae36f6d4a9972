"""In-place ops, no-grad and autocast regions come out with the values and gradients of the eager module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hetu_fx.errors import CaptureError
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import OutputKind
from tests.graph.compare import assert_same_as_eager

aten = torch.ops.aten


class Program(nn.Module):
    """A linear layer, a batch norm, and a forward given as a function of (module, x)."""

    def __init__(self, body: object) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.rows_norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.body = body
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)  # type: ignore[operator, no-any-return]


def slice_and_select(self: Program, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    z = y.transpose(0, 1)
    y[:, 1:3].mul_(2)
    y[0] += 1
    y.view(-1)[3].fill_(7.0)
    return (z * y.t()).sum()


def views_before_and_after(self: Program, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x) * 1
    before = y[:, 0]
    first, second = (x * 2).split(3, dim=1)
    second.add_(first)
    y.unsqueeze(1).squeeze(1).permute(1, 0)[2] = 0.5
    return (before * y[:, 4]).sum() + second.pow(2).sum()


def a_filled_diagonal(self: Program, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    similar = y @ y.t()
    similar.fill_diagonal_(0.5)
    y.fill_diagonal_(2.0)
    return (similar * similar).sum() + y.pow(2).sum()


def masks_and_puts(self: Program, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x).clone()
    y.masked_fill_(x > 1, 0.25)
    y[torch.tensor([0, 1]), 2:4] = x[:2, :2]
    y.clamp_(min=-1).relu_()
    z = torch.zeros_like(x)
    z.copy_(y)
    z[:, 5].copy_(x[:, 0])
    return z.pow(2).sum()


def chained(self: Program, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x).neg_().mul_(0.5)
    w = y.add_(x)
    w[0].zero_()
    return (w + self.linear(x)).sum() + y.sum()


def no_grad(self: Program, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = self.linear(x) * 2
        with torch.enable_grad():
            inner = self.linear(x + 1)
        both = target + inner
    return (self.linear(x) - target).pow(2).sum() + (both * inner).sum() + self.linear(x).detach().sum()


def batch_norm(self: Program, x: torch.Tensor) -> torch.Tensor:
    return self.norm(self.norm(self.linear(x))).pow(3).sum()


def native_batch_norm(self: Program, x: torch.Tensor) -> torch.Tensor:
    norm, h = self.norm, self.linear(x)
    given = norm.weight, norm.bias, norm.running_mean, norm.running_var
    y, mean, rate = torch.native_batch_norm(h, *given, True, 0.1, 1e-5)
    return y.pow(3).sum() + (h * rate - mean).pow(2).sum()


def buffer_update(self: Program, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return (self.linear(x) * self.seen).sum()


def out_arguments(self: Program, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch.div(x.mean(0), 3.0, out=self.seen)
        self.seen = nn.functional.normalize(self.seen + 1, dim=0, out=self.seen)
    return (self.linear(x) * self.seen).sum()


def in_place_dropout(self: Program, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(self.linear(x), 0.3, training=self.training, inplace=True).sum()


def autocast(self: Program, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            y = y + self.linear(x)
        z = nn.functional.softmax(self.linear(y) @ y.t(), -1)
        loss = nn.functional.mse_loss(z, z.detach() * 2)
    return loss + nn.functional.layer_norm(y, (6,)).float().sum()


def in_place_after_a_norm(self: Program, x: torch.Tensor) -> torch.Tensor:
    y = nn.functional.hardswish(self.norm(self.linear(x)), inplace=True)
    z = self.norm(y)
    z[:, 1:3] *= 2
    z.view(-1, 2, 3)[:, 0].add_(y[:, :3])
    return (z.relu_() * y).sum()


def in_place_after_a_norm_of_each_row(self: Program, x: torch.Tensor) -> torch.Tensor:
    y = self.rows_norm(self.linear(x).view(-1, 2, 3))
    y[:, 0] = 0.5
    return nn.functional.silu(y, inplace=True).pow(2).sum()


def writes_to_complex_values(self: Program, x: torch.Tensor) -> torch.Tensor:
    y = torch.fft.fft(self.linear(x))
    z = torch.zeros_like(y)
    z[:, -3:] = y[:, :3] * (1 + 2j)
    z[..., 0] = y.conj()[:, 1]
    z.diagonal(0, -2, -1)[:2] = x[:2, 0]
    return (z * y.conj()).abs().pow(2).sum()


def powers(self: Program, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x).abs()
    z = (y + 1).pow_(2) + (y + 2).pow_(y) + (y + 3).float_power_(0.5) + (2 + y).ldexp_(y)
    z.pow_(torch.tensor(1.5)).floor_divide_(torch.tensor(1e-3))
    return (z.detach() * y).sum() + (y + 1).pow_(y.shape[0]).sum() + (2**y + torch.pow(3, y) + y**y).sum()


def other_in_place_forms(self: Program, x: torch.Tensor) -> torch.Tensor:
    mask = x > 0
    mask &= x < 1
    mask |= x < -1
    y = self.linear(x) * mask
    return (y.transpose_(0, 1).float_power_(2) @ x).sum()


BODIES = [
    slice_and_select, views_before_and_after, masks_and_puts, chained, no_grad, batch_norm, native_batch_norm,
    buffer_update, out_arguments, in_place_dropout, in_place_after_a_norm, in_place_after_a_norm_of_each_row,
    writes_to_complex_values, powers, other_in_place_forms,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("rows", [5, 3])
def test_captured_body_equals_eager(body: object, rows: int) -> None:
    model = Program(body).double().train()
    graph = capture(model, (torch.randn(5, 6, dtype=torch.float64),))
    assert graph.batch_symbol is not None, graph.notes
    assert_same_as_eager(model, graph, (torch.randn(rows, 6, dtype=torch.float64),), 1e-12)


def test_autocast_regions_are_written_out_as_casts() -> None:
    model = Program(autocast).train()
    graph = capture(model, (torch.randn(5, 6),))
    assert any(node.target is aten.to.dtype and node.args[1] is torch.bfloat16 for node in graph.graph.nodes)
    assert_same_as_eager(model, graph, (torch.randn(4, 6),), 0.0)


def one_half_in_another(self: Program, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        y = self.linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = y @ x.t()
            both = torch.cat([z, z.float()])
    return both.sum() + (z.half() @ y).float().sum()


def test_autocast_regions_of_unlike_halves_may_stand_in_each_other() -> None:
    model = Program(one_half_in_another).train()
    graph = capture(model, (torch.randn(5, 6),))
    assert_same_as_eager(model, graph, (torch.randn(4, 6),), 0.0)


def test_ambient_autocast_is_written_out_as_casts() -> None:
    model = Program(batch_norm).train()
    x = torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(model, (x,))
        wanted = model(x)
    assert torch.equal(graph.module()(*_values(graph, model, x))[0], wanted)


def _values(graph: object, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    from tests.graph.compare import leaf_values

    return leaf_values(graph, model, (x,))  # type: ignore[arg-type]


def test_updated_buffers_are_outputs_named_after_them() -> None:
    graph = capture(Program(batch_norm).train(), (torch.randn(5, 6),))
    names = [leaf.name for leaf, _ in graph.outputs_of(OutputKind.BUFFER_UPDATE)]
    assert sorted(names) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]


def test_writing_to_a_parameter_is_refused_with_the_line() -> None:
    def body(self: Program, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x).sum()

    with pytest.raises(CaptureError, match=r"parameter 'linear.weight' in place \(test_functional.py:\d+\)"):
        capture(Program(body), (torch.randn(5, 6),))


def test_writing_without_gradient_to_what_carries_one_is_refused() -> None:
    def body(self: Program, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            y.mul_(0.5)
        return y.sum()

    with pytest.raises(CaptureError, match=r"no-grad.*test_functional.py:\d+"):
        capture(Program(body), (torch.randn(5, 6),))


def test_writing_through_an_expanded_view_is_refused_with_the_line() -> None:
    def body(self: Program, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).sum(0, keepdim=True)
        y.as_strided((6,), (1,)).add_(1)
        return y.sum()

    with pytest.raises(CaptureError, match=r"as_strided.*test_functional.py:\d+"):
        capture(Program(body), (torch.randn(5, 6),))
