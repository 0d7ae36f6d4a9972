"""Whether a forward reads a plain value of its batch is seen while it is traced, by stand-ins for it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from hetu_fx.graph.unread import UnreadValues, ValueRead
from hetu_fx.program.captures import Programs
from tests.graph.compare import run_on_one_device


def first_of(items: Any) -> Any:
    match items:
        case [first, *_]:
            return first
        case _:
            return None


READS: dict[str, Callable[[Any, Any], object]] = {
    "compared": lambda text, items: text == "a.png",
    "looked for": lambda text, items: "b" in items,
    "counted": lambda text, items: len(items),
    "taken as true": lambda text, items: 1 if items else 2,
    "negated": lambda text, items: not text,
    "gone through": lambda text, items: [*items],
    "taken apart": lambda text, items: {**dict.fromkeys(items)},
    "indexed": lambda text, items: items[0],
    "hashed": lambda text, items: {text: 1},
    "looked up": lambda text, items: {"a.png": 1}.get(text),
    "formatted": lambda text, items: f"{text}",
    "printed": lambda text, items: str(items),
    "called": lambda text, items: text.endswith(".png"),
    "added": lambda text, items: text + "!",
    "repeated": lambda text, items: [0] * len(items),
    "sorted": lambda text, items: sorted(items),
    "joined": lambda text, items: ",".join(items),
    "pickled": lambda text, items: pickle.dumps({"text": text}),
    "mapped by torch": lambda text, items: tree_map(lambda leaf: leaf, {"items": items}),
    "matched": lambda text, items: first_of(items),
    "its size": lambda text, items: text.__sizeof__(),
}


def stand_ins() -> tuple[UnreadValues, Any, Any]:
    values = UnreadValues({"text": "a.png", "items": ["a", "b"]})
    return values, values.stand_ins["text"], values.stand_ins["items"]


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_any_use_of_a_value_ends_the_trace_and_takes_it_out(read: Callable[[Any, Any], object]) -> None:
    values, text, items = stand_ins()
    with pytest.raises(ValueRead), values.watching():
        read(text, items)
    assert values.take_out(failed=True)
    assert len(values.stand_ins) == 1


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_after_a_trace_a_stand_in_that_was_left_somewhere_is_as_its_value(read: Callable[[Any, Any], object]) -> None:
    _, text, items = stand_ins()
    if read is not READS["pickled"]:
        assert read(text, items) == read("a.png", ["a", "b"])


def test_a_value_that_is_moved_or_asked_for_its_class_is_not_read() -> None:
    values, text, items = stand_ins()
    with values.watching():
        batch = {"text": text, "nested": [items, (text,)]}
        moved = {key: value for key, value in batch.items() if value is not None}
        assert isinstance(text, str)
        assert isinstance(items, list) is isinstance(items, Sequence) is True
        assert not isinstance(text, torch.Tensor | dict)
        assert not isinstance(items, torch.Tensor | dict)
        assert not any((hasattr(text, "shape"), hasattr(items, "to"), callable(text)))
        assert moved["text"] is text
        assert text.__class__ is str
    assert not values.take_out(failed=False)
    assert len(values.stand_ins) == 2


def test_what_takes_no_stand_in_fails_and_all_are_taken_out() -> None:
    values, text, items = stand_ins()
    with pytest.raises(TypeError), values.watching():
        json.dumps({"text": text, "items": items})
    assert values.take_out(failed=True)
    assert not values.stand_ins


class Scaling(nn.Module):
    def __init__(self, factor: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 1), factor

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (self.layer(x) * self.factor(name)).sum()


def by_type(name: Any) -> float:
    return 2.0 if type(name) is str and name.startswith("a") else 1.0


def by_alias(name: Any) -> float:
    kinds = [*map(type, [name])]
    return 2.0 if kinds == [str] and name.startswith("a") else 1.0


def by_suppressed(name: Any) -> float:
    try:
        return 2.0 if name.startswith("a") else 1.0
    except:  # noqa: E722  what a careless script does
        return 3.0


@pytest.mark.parametrize("factor", [by_type, by_alias, by_suppressed, lambda name: 2.0 if name == "a" else 1.0])
def test_a_graph_has_what_follows_from_the_values_that_were_read(factor: Callable[[Any], float]) -> None:
    model, x = Scaling(factor).double(), torch.randn(4, 3, dtype=torch.float64)
    programs = Programs(model, None)
    for name in ("b", "a", "b"):
        batch = {"x": x, "name": name}
        graph = programs.find(batch, True).graph
        (made,) = run_on_one_device(graph, model, batch).values()
        assert made.item() == pytest.approx(model(x, name).item(), rel=1e-12)
    assert programs.events.count == 2


class NamingItself(Scaling):
    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if type(self).__name__ != "NamingItself":  # no assert: pytest makes other code of it
            raise TypeError
        return super().forward(x, "b")


def test_a_forward_that_asks_its_own_class_alone_may_pass_values_on() -> None:
    programs, x = Programs(NamingItself(by_type), None), torch.randn(4, 3)
    asked = [programs.find({"x": x, "name": name}, True) for name in "ab"]
    assert asked[0] is not asked[1], "by_type may be given the name"
    programs = Programs(NamingItself(len), None)
    asked = [programs.find({"x": x, "name": name}, True) for name in "ab"]
    assert asked[0] is asked[1]
