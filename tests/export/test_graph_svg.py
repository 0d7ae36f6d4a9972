"""Pictures of graphs: a box for each module, repeated blocks drawn once, and communication told apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, fx, nn

import hetu_fx
from hetu_fx.export.graph_svg import MOST_BOXES, PictureBox, draw, outline
from hetu_fx.export.single import make_runnable
from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.plans.plan import Plan


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


class Stack(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, widths))
        self.head = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            features = block(features)
        return {"loss": self.head(features).square().mean()}


def texts_of(picture: str) -> list[str]:
    return [str(text.text) for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def picture_of(model: nn.Module) -> str:
    graph = capture(model, {"features": torch.zeros(5, 4)})
    return draw(make_runnable(graph, model), "a <stack>", graph.block_paths)


def test_blocks_that_are_alike_are_drawn_once() -> None:
    texts = texts_of(picture_of(Stack(*[6] * 50, 7, 7)))
    assert texts[0] == "a <stack>"
    assert "features [?, 4]" in texts
    assert [text for text in texts if " x " in text] == [
        "50 x Block, the first of them blocks.0",
        "2 x Block, the first of them blocks.50",
    ]
    assert texts.count("inner: Linear") == 2
    assert {"inner.weight [6, 4]", "inner.weight [7, 4]", "head: Linear", "head.weight [3, 4]"} <= set(texts)


def test_what_is_drawn_fits_the_picture() -> None:
    root = ElementTree.fromstring(picture_of(Stack(6, 7)))
    height = int(root.attrib["height"])
    boxes = [box for box in root.iter("{http://www.w3.org/2000/svg}rect") if "y" in box.attrib]
    assert len(boxes) > 8
    assert max(int(box.attrib["y"]) + int(box.attrib["height"]) for box in boxes) <= height
    assert not re.search(r"[0-9a-fx]{12}|/home|/tmp", ElementTree.tostring(root, encoding="unicode"))


def test_communication_is_a_box_of_its_own_and_many_modules_are_told_less_deeply() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for number in range(2 * MOST_BOXES):
        value = graph.call_function(torch.ops.aten.relu.default, (value,))
        meta.set_module_stack(value, (("part", "Part"), (f"part.m{number}", "ReLU")))
    graph.output((graph.call_function(torch.ops.hetu.all_reduce.default, (value, [0, 1], "identity")),))
    (group,) = outline(graph, (), {})
    assert group.boxes[0] == PictureBox("part", "Part", ("relu",))
    assert [box.kind for box in group.boxes] == ["Part", "communication"]


def test_each_graph_of_an_export_has_its_picture(tmp_path: Path) -> None:
    model: Any = hetu_fx.auto_parallelize(Stack(6, 6), {"features": torch.zeros(4, 4)}, plan=Plan.single())
    model.hetu.export(tmp_path / "export")
    for path in (tmp_path / "export").rglob("*.pt2"):
        assert "2 x Block, the first of them blocks.0" in texts_of(path.with_suffix(".svg").read_text())
