"""Repeated blocks are found from module stacks."""

from __future__ import annotations

import pytest
from torch import nn

from hetu_fx.graph.blocks import block_index, find_blocks


def stacks(*paths: str, leaf: str = "lin") -> list[tuple[tuple[str, str], ...]]:
    """Module stacks of ops inside a child `leaf` of each path, classes by the last name that is no number."""
    found = []
    for path in paths:
        names = path.split(".")
        prefixes = [".".join(names[: i + 1]) for i in range(len(names))]
        kinds = [next(n for n in reversed(p.split(".")) if not n.isdigit()).title() for p in prefixes]
        inner = ((f"{path}.{leaf}", "Linear"),) if leaf else ()
        found.append((*zip(prefixes, kinds, strict=True), *inner))
    return found


def test_layers_of_a_module_list_are_blocks() -> None:
    assert find_blocks(stacks("embed", "layers.0", "layers.1", "head")) == ("layers.0", "layers.1")


def test_chains_are_concatenated_in_order_of_execution() -> None:
    found = find_blocks(stacks("enc.h.0", "enc.h.1", "dec.h.0", "dec.h.1"))
    assert found == ("enc.h.0", "enc.h.1", "dec.h.0", "dec.h.1")


def test_only_outermost_chains_count() -> None:
    paths = [f"layers.{i}.experts.{j}" for i in range(2) for j in range(3)]
    assert find_blocks(stacks(*paths)) == ("layers.0", "layers.1")


def test_chains_of_plain_layers_count_only_if_there_is_nothing_else() -> None:
    plain = stacks("mlp.0", "mlp.1", leaf="")
    assert find_blocks(plain) == ("mlp.0", "mlp.1")
    assert find_blocks(plain + stacks("h.0", "h.1")) == ("h.0", "h.1")


def test_one_layer_is_no_chain() -> None:
    assert find_blocks(stacks("layers.0", "head")) == ()


@pytest.mark.parametrize(("path", "index"), [("layers.1.lin", 1), ("layers.0", 0), ("head", None)])
def test_block_index_looks_at_the_whole_stack(path: str, index: int | None) -> None:
    (stack,) = stacks(path)
    assert block_index(stack, ("layers.0", "layers.1")) == index


def test_layers_with_two_digits_are_not_mixed_up() -> None:
    paths = [f"layers.{i}" for i in range(12)]
    found = find_blocks(stacks(*paths))
    assert found == tuple(paths)
    assert block_index(stacks("layers.11")[0], found) == 11


def test_residual_stages_are_concatenated() -> None:
    import torch

    from hetu_fx.graph.capture import capture

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x)

    def stage(depth: int) -> nn.Sequential:
        return nn.Sequential(*(Residual() for _ in range(depth)))

    graph = capture(nn.Sequential(stage(2), stage(3)), (torch.randn(4, 6),))
    assert graph.num_blocks == 2
