"""The runtime is the one owner of live state: others tell it what they want by its methods."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import hetu_fx
from tests.house.tree import trees
from tests.switching.clocks import Ahead

OWNERS = {"hetu_fx.switching.runtime", "hetu_fx.switching.variants"}
NAMES = {"runtime", "_runtime"}
CHANGES = {"append", "extend", "insert", "remove", "pop", "clear", "update", "setdefault", "add", "discard"}


def is_of_a_runtime(node: ast.expr) -> bool:
    """Tell whether an expression reaches through a runtime: `runtime.x`, `self._runtime.x.y[z]`."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in NAMES:
            return True
    return False


def targets_of(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield what a module writes to: targets of assignments, and containers whose methods change them."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                for target in targets:
                    yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                yield target
            case ast.Call(func=ast.Attribute(value=container, attr=name)) if name in CHANGES:
                yield container


def written(tree: ast.Module) -> list[str]:
    """List what a module writes to of a runtime."""
    return [ast.unparse(target) for target in targets_of(tree) if is_of_a_runtime(target)]


@pytest.mark.parametrize(
    "source",
    ["runtime.step = 1", "a, self._runtime.guess.value = 1, 2", "runtime.x += 1", "del runtime.x", "runtime.x[0] = 1"],
)
def test_writing_is_found(source: str) -> None:
    assert written(ast.parse(source))
    assert written(ast.parse("self.runtime.hooks.append(1)")) == ["self.runtime.hooks"]
    assert written(ast.parse("runtime = Runtime(); self.runtime = runtime; x = runtime.step; runtime.watch(x)")) == []


def test_only_its_own_module_writes_to_a_runtime() -> None:
    found = {name: written(tree) for name, tree in trees().items() if name not in OWNERS}
    assert {name: targets for name, targets in found.items() if targets} == {}


def test_one_device_alone_is_not_waited_for_at_the_start_of_a_step() -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), (torch.randn(3, 4),)
    model = hetu_fx.auto_parallelize(model, batch, plan=hetu_fx.Plan.single(0), loss_fn=lambda y, input: y.mean())
    model.hetu._runtime.clock = Ahead()
    for _ in range(3):
        model(*batch).loss.backward()
    assert model.hetu._runtime.clock.waits == 0
    assert model.hetu.stats["compute_seconds"] > 0


class Noisy(nn.Module):
    """Normalizes its rows, drops some of what it makes, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.out = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.drop(self.out(self.norm(x)))


def test_buffers_are_written_by_calls_that_train_nothing() -> None:
    x, plain = torch.randn(6, 4), Noisy()
    model = hetu_fx.auto_parallelize(copy.deepcopy(plain), (x,), plan="data")
    average = AveragedModel(model)
    for net in (plain, model):
        with torch.no_grad():
            net(x)
            net.eval()(2 * x)
        net.requires_grad_(requires_grad=False).train()(3 * x)
    assert model.calls == plain.calls == 3
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    update_bn([x, x], average)
    torch.testing.assert_close(average.module.norm.running_mean, x.mean(0))


def test_each_call_draws_numbers_of_its_own_also_without_training() -> None:
    x = torch.randn(6, 4)
    model = hetu_fx.auto_parallelize(Noisy(), (x,), plan="data", seed=3)
    model.eval().drop.train()
    with torch.no_grad():
        made = [model(x), model(x)]
    made += [model(x), model.train()(x), model(x)]
    masks = {tuple((one == 0).flatten().tolist()) for one in made}
    assert len(masks) == len(made)
