"""All pieces of a module are compiled before one of them runs, for the sizes that they will be given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from hetu_fx.transforms.lowering.ahead import CompiledAhead, Piece
from hetu_fx.transforms.lowering.compiled import Compiled
from tests.transforms.lowering.test_block_modules import WIDTH, Cut, Tower


class Log:
    """A compiler, and what is around it, that write down what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def compiler(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.events.append("compiled")

        def run(*given: Any) -> Any:
            self.events.append("ran")
            return graph.forward(*given)

        return run

    @contextmanager
    def together(self) -> Iterator[None]:
        self.events.append("begin")
        yield
        self.events.append("end")


def ahead(cut: Cut, log: Log) -> CompiledAhead:
    compiled = {id(block): Compiled(block, log.compiler) for block in cut.blocks}  # type: ignore[arg-type]
    pieces = {name: Piece(block, compiled[id(block)]) for name, block in cut.cut.named_children()}  # type: ignore[arg-type]
    fixed = [slot.name in cut.parameters for slot in cut.device.slots]
    return CompiledAhead(fx.GraphModule(pieces, cut.cut.graph), fixed, log.together)


def test_all_is_compiled_together_at_the_first_call_and_for_other_sizes_no_more() -> None:
    log, made = Log(), Cut(Tower(8, 8, 8))
    function, start = ahead(made, log), ["begin", *["compiled"] * 3, "end"]
    for rows, before in ((4, start), (7, []), (5, [])):
        log.events.clear()
        made.gradients(function, torch.randn(rows, WIDTH))
        assert log.events == [*before, *["ran"] * 5]


def test_what_runs_without_gradients_first_is_compiled_together_too() -> None:
    log, made = Log(), Cut(Tower(8, 8))
    function = ahead(made, log)
    made.gradients(function, torch.randn(4, WIDTH))
    log.events.clear()
    with torch.no_grad():
        function(*(made.parameters.get(slot.name, torch.randn(4, WIDTH)) for slot in made.device.slots))
    assert log.events == ["begin", *["compiled"] * 3, "end", *["ran"] * 4]


def test_sizes_are_open_although_they_are_one_at_first() -> None:
    log, made, foreseen = Log(), Cut(Tower(8, 8)), ["begin", *["compiled"] * 3, "end"]
    function = ahead(made, log)
    for rows, before in ((1, foreseen), (4, foreseen), (7, []), (1, [])):
        log.events.clear()
        made.gradients(function, torch.randn(rows, WIDTH))
        assert log.events == [*before, *["ran"] * 4]


def test_a_piece_that_meets_other_inputs_than_foreseen_is_compiled_then() -> None:
    log, made = Log(), Cut(Tower(8, 8))
    function = ahead(made, log)
    made.gradients(function, torch.randn(4, WIDTH))
    log.events.clear()
    made.parameters = {name: value.requires_grad_(name != "head.bias") for name, value in made.parameters.items()}
    function(*(made.parameters.get(slot.name, torch.randn(4, WIDTH)) for slot in made.device.slots))
    assert log.events == [*["ran"] * 3, "compiled", "ran"]


def test_what_draws_is_compiled_once_whatever_tells_it_apart() -> None:
    log, made = Log(), Cut(Tower(8, 8, 8, p=0.4))
    made.gradients(ahead(made, log), torch.randn(4, WIDTH))
    assert log.events.count("compiled") == 3
