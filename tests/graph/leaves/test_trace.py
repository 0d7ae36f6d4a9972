"""What no trace goes into is an op; what an op cannot do is refused by name, and what is around it is tried instead."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.errors import CaptureError
from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, OutputKind
from hetu_fx.graph.leaves.leaf_ops import LEAF
from hetu_fx.graph.leaves.mark import leaf
from hetu_fx.graph.leaves.trace import LeafWarning

Does = Callable[["Part", Tensor], Tensor]


class Part(nn.Module):
    """Does something with what it is given; has a layer, a buffer, and attributes."""

    count: Tensor

    def __init__(self, does: Does) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.does, self.seen, self.total = does, 0, torch.tensor(20_000)
        self.numbers, self.meter, self.queue = np.zeros(2), SimpleNamespace(count=0), deque[Tensor](maxlen=3)
        self.aside, self.counted = list[nn.Linear](), itertools.count()

    def forward(self, h: Tensor) -> Tensor:
        return self.does(self, h)


class Model(nn.Module):
    """A layer, and a part of its own, in a part around it."""

    def __init__(self, does: Does) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.around = nn.Sequential(nn.Tanh(), Part(does))
        self.around[1].aside.append(self.first)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.around(self.first(x))
        return made.sum()


def normalizes(part: Part, h: Tensor) -> Tensor:
    """Has a bias of which nothing is left, so that its gradient is rounding."""
    made = part.layer(h)
    made = made - made.mean(0)
    return made if made.sum() > -1 else h


def by_values(part: Part, h: Tensor) -> Tensor:
    return part.layer(h) if h.mean() > 0 else h * 2


def graph_of(does: Does, *, named: bool = True) -> Graph:
    model = Model(does)
    if named:
        leaf(model.around[1])
    return capture(model, {"x": torch.randn(6, 4)})


def test_a_call_is_one_op_with_the_state_as_operands() -> None:
    graph = graph_of(by_values)
    (node,) = graph.graph.find_nodes(op="call_function", target=LEAF)
    values, state = node.args[:2]
    assert [leaf.name for leaf in graph.leaves if leaf.node in state] == [
        "around.1.layer.weight",
        "around.1.layer.bias",
        "around.1.count",
    ]
    assert len(values) == 1
    (made,) = meta.value(node)
    assert meta.expression(made.shape[0]) == graph.batch_symbol
    assert [call.label for call in graph.leaf_calls] == ["around.1 (Part)"]


def test_a_bias_whose_gradient_is_rounding_keeps_no_part_from_being_a_leaf() -> None:
    assert [call.label for call in graph_of(normalizes).leaf_calls] == ["around.1 (Part)"]


def test_values_and_gradients_are_those_of_the_module() -> None:
    model = leaf_model(by_values)
    graph = capture(model, {"x": torch.randn(6, 4)})
    for sign in (-1.0, 1.0):
        x = torch.randn(5, 4) + 9 * sign
        expected = model(x)
        model.zero_grad()
        expected.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        named = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        given = {**named, **dict(model.named_buffers()), "x": x}
        (found, *_) = graph.module()(*(given[one.name] for one in graph.leaves))
        found.backward()
        torch.testing.assert_close(found, expected)
        for name, parameter in named.items():
            torch.testing.assert_close(parameter.grad, gradients[name])


def leaf_model(does: Does) -> Model:
    model = Model(does)
    leaf(model.around[1])
    return model


def test_what_is_found_by_itself_is_the_smallest_module_around_the_line() -> None:
    with pytest.warns(LeafWarning, match=r"around\.1 \(Part\) is a leaf.*test_trace\.py:\d+"):
        graph = graph_of(by_values, named=False)
    assert [call.label for call in graph.leaf_calls] == ["around.1 (Part)"]


class Chosen:
    """Some rows, that are no tensor."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Chooses(nn.Module):
    """Returns what no op returns."""

    def forward(self, h: Tensor) -> Chosen:
        return Chosen(h * 3 if h.mean() > 0 else h)


class Asks(nn.Module):
    """Goes on by values in a module, or by itself, and is in a model."""

    def __init__(self, inside: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(4, 4), inside

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.inside is not None:
            return self.inside(h).rows.sum()
        return h.sum() if h.mean() > 0 else h.square().sum()


def test_the_module_around_it_is_taken_where_it_cannot_be_a_leaf_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Asks(Chooses()))
    with pytest.warns(LeafWarning, match=r"1 \(Asks\) is a leaf"):
        graph = capture(model, {"input": torch.randn(6, 4)})
    assert [call.label for call in graph.leaf_calls] == ["1 (Asks)"]


def test_what_is_alike_in_repeated_blocks_is_found_together() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Part(by_values)) for _ in range(3)))
    with pytest.warns(LeafWarning, match=r"0\.1 \(Part\) is a leaf \(and 2 like it\)") as told:
        graph = capture(model, {"input": torch.randn(6, 4)})
    assert len(told) == 1
    assert [call.label for call in graph.leaf_calls] == ["0.1 (Part)", "1.1 (Part)", "2.1 (Part)"]


def _keeps_state(part: Part, h: Tensor) -> Tensor:
    part.seen += 1
    return by_values(part, h)


def _keeps_state_in_private(part: Part, h: Tensor) -> Tensor:
    part._calls = getattr(part, "_calls", 0) + 1  # type: ignore[assignment]
    return by_values(part, h)


def _draws_in_python(part: Part, h: Tensor) -> Tensor:
    return by_values(part, h) * random.random()


def _tells_the_time(part: Part, h: Tensor) -> Tensor:
    return by_values(part, h) * (time.perf_counter_ns() % 1000)


def _writes_to_its_input(part: Part, h: Tensor) -> Tensor:
    return by_values(part, h.detach().add_(1))


def _makes_a_size_of_values(part: Part, h: Tensor) -> Tensor:
    return h[h > 0.5]


_STRANGE = nn.Parameter(torch.ones(4))


def _reads_a_strange_parameter(part: Part, h: Tensor) -> Tensor:
    return by_values(part, h) * _STRANGE


def _reads_a_strange_buffer(part: Part, h: Tensor) -> Tensor:
    return by_values(part, h) * part.aside[0].weight.detach()[0, 0]


def _returns_a_number(part: Part, h: Tensor) -> Tensor:
    return h.mean().item()  # type: ignore[return-value]


def _writes_by_data(part: Part, h: Tensor) -> Tensor:
    h.data.clamp_(min=0.3)
    return by_values(part, h)


def _writes_by_numpy(part: Part, h: Tensor) -> Tensor:
    h.detach().numpy()[...] = 1.0
    return by_values(part, h)


def _returns_a_sparse_tensor(part: Part, h: Tensor) -> Tensor:
    return by_values(part, h).to_sparse()


def _counts_in_an_array(part: Part, h: Tensor) -> Tensor:
    part.numbers[0] += 1
    return by_values(part, h)


def _counts_from_far_up(part: Part, h: Tensor) -> Tensor:
    part.total = part.total + 1
    return by_values(part, h)


def _counts_in_an_object(part: Part, h: Tensor) -> Tensor:
    part.meter.count += 1
    return by_values(part, h)


def _counts_by_an_iterator(part: Part, h: Tensor) -> Tensor:
    return by_values(part, h) * (1 + 0 * next(part.counted))


def _remembers_in_a_queue(part: Part, h: Tensor) -> Tensor:
    part.queue.append(h.detach().mean())
    return by_values(part, h)


def _clips_its_gradient(part: Part, h: Tensor) -> Tensor:
    made = by_values(part, h)
    made.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return made


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (_keeps_state, "keeps state in attributes: seen of Part"),
        (_keeps_state_in_private, "keeps state in attributes: _calls of Part"),
        (_draws_in_python, "draws numbers of `random`"),
        (_tells_the_time, "two calls on the same values"),
        (_writes_to_its_input, "writes to a tensor that it is given"),
        (_makes_a_size_of_values, "does not follow from the sizes of its inputs"),
        (_reads_a_strange_parameter, r"a trainable tensor of shape \(4,\) that is no parameter"),
        (_reads_a_strange_buffer, "a parameter or buffer of the model that is none of it"),
        (_writes_by_data, "writes to a tensor that it is given"),
        (_writes_by_numpy, "writes to a tensor that it is given"),
        (_returns_a_sparse_tensor, r"returns a tensor of layout torch\.sparse_coo"),
        (_counts_in_an_array, "keeps state in attributes: numbers of Part"),
        (_counts_from_far_up, "keeps state in attributes: total of Part"),
        (_counts_in_an_object, "keeps state in attributes: meter of Part"),
        (_counts_by_an_iterator, "keeps state in attributes: counted of Part"),
        (_remembers_in_a_queue, "keeps state in attributes: queue of Part"),
        (_clips_its_gradient, "backward is not linear"),
        (_returns_a_number, "differs between two calls|returns no tensor"),
    ],
)
def test_what_no_op_can_do_is_refused_by_name(does: Does, why: str) -> None:
    with pytest.raises(CaptureError, match=rf"around\.1 \(Part\) cannot be a leaf: .*({why})"):
        graph_of(does)


def test_a_line_of_the_model_itself_is_refused_as_before() -> None:
    with pytest.raises(CaptureError, match=r"cannot capture the model at test_trace\.py.*goes on either way"):
        capture(Asks(), {"x": torch.randn(6, 4)})


def test_the_whole_model_is_no_leaf() -> None:
    with pytest.raises(CaptureError, match="names the whole model"):
        capture(leaf(nn.Linear(4, 4)), {"input": torch.randn(6, 4)})


def test_a_loss_function_is_a_leaf_as_a_whole() -> None:
    def loss_fn(output: Tensor, input: Tensor) -> Tensor:
        return output.square().mean() if output.max() > 1 else output.abs().mean()

    with pytest.warns(LeafWarning, match=r"loss_fn \(.*loss_fn\) is a leaf"):
        graph = capture(nn.Linear(4, 4), {"input": torch.randn(6, 4)}, loss_fn=loss_fn)
    assert len(graph.leaf_calls) == 1


def test_a_module_in_a_loss_function_is_a_leaf() -> None:
    class Loss(nn.Module):
        def forward(self, output: Tensor) -> Tensor:
            return output.square().mean() if output.max() > 1 else output.abs().mean()

    loss = Loss()
    with pytest.warns(LeafWarning, match=r"loss_fn\.Loss \(Loss\) is a leaf"):
        capture(nn.Linear(4, 4), {"input": torch.randn(6, 4)}, loss_fn=lambda output, input: loss(output))


def test_a_buffer_that_it_writes_to_is_updated() -> None:
    def counts(part: Part, h: Tensor) -> Tensor:
        part.count.add_(float(h.sum() > 0) + 1)
        return by_values(part, h)

    graph = graph_of(counts)
    ((output, node),) = graph.outputs_of(OutputKind.BUFFER_UPDATE)
    assert output.name == "around.1.count"
    assert not meta.shape(node)


def test_sizes_that_it_is_given_stay_sizes() -> None:
    class Cut(nn.Module):
        def forward(self, h: Tensor, count: int) -> Tensor:
            return F.pad(h, (0, count - h.shape[0])) if h.mean() > 0 else h * 2

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cut = nn.Linear(4, 4), leaf(Cut())

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.cut(self.first(x), x.shape[0])
            return made.sum()

    graph = capture(Gives(), {"x": torch.randn(6, 4)})
    (call,) = graph.leaf_calls
    assert list(call.invocation.sizes.values()) == [(0, 0)]
    assert call.forms == ("float32 1*0.0 4",)


def test_what_it_leaves_in_an_attribute_for_itself_is_no_state() -> None:
    def leaves(part: Part, h: Tensor) -> Tensor:
        part.seen = int((h > 0).sum())
        return by_values(part, h) * part.seen

    assert len(graph_of(leaves).graph.find_nodes(op="call_function", target=LEAF)) == 1


class Balanced(nn.Module):
    """Leaves a second loss in an attribute, as layers of experts do."""

    extra: Tensor

    def forward(self, h: Tensor) -> Tensor:
        self.extra = h.square().mean() if h.mean() > 0 else h.abs().mean()
        return h


class Adds(nn.Module):
    """Adds the loss that a layer has left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.balanced = nn.Linear(4, 4), Balanced()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.balanced(self.first(x))
        return made.sum() + self.balanced.extra


def test_what_it_leaves_in_an_attribute_for_others_makes_these_a_leaf_with_it() -> None:
    with pytest.warns(LeafWarning, match=r"0 \(Adds\) is a leaf"):
        capture(nn.Sequential(Adds(), nn.Identity()), {"input": torch.randn(6, 4)})
    with pytest.raises(CaptureError, match=r"balanced \(Balanced\): the forward around it reads the attribute 'extra'"):
        capture(Adds(), {"x": torch.randn(6, 4)})


class Halves(nn.Module):
    """Goes on by values."""

    def forward(self, h: Tensor) -> Tensor:
        return h / 2 if h.mean() > 0 else h


class Makes(nn.Module):
    """Makes the module that it calls in its forward."""

    def forward(self, h: Tensor) -> Tensor:
        made: Tensor = Halves()(h)
        return made


def test_the_module_around_one_that_the_forward_makes_itself_is_the_leaf() -> None:
    with pytest.warns(LeafWarning, match=r"1 \(Makes\) is a leaf"):
        graph = capture(nn.Sequential(nn.Linear(4, 4), Makes()), {"input": torch.randn(6, 4)})
    assert [call.label for call in graph.leaf_calls] == ["1 (Makes)"]


def test_its_backward_draws_the_numbers_of_its_forward() -> None:
    def drops(part: Part, h: Tensor) -> Tensor:
        return F.dropout(h * 2 if h.mean() > 0 else h * 3, 0.5)

    graph = graph_of(drops)
    (node,) = graph.graph.find_nodes(op="call_function", target=LEAF)
    state = [torch.zeros(meta.hints(operand)) for operand in node.args[1]]
    x = torch.rand(50, 4, requires_grad=True)
    made = [LEAF([x], state, torch.tensor([7, step, 0]), 1, *node.args[4:])[0] for step in (3, 3, 4)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    made[0].sum().backward()
    torch.testing.assert_close(x.grad, made[0].detach() / x.detach())


def test_a_cache_that_it_fills_is_left_as_it_was() -> None:
    def caches(part: Part, h: Tensor) -> Tensor:
        part.seen = part.seen or 3
        return by_values(part, h)

    model = leaf_model(caches)
    capture(model, {"x": torch.randn(6, 4)})
    assert model.around[1].seen == 0


class Writes(nn.Module):
    """Writes in place to what a leaf has returned, or not."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.part, self.act = nn.Linear(4, 4), leaf(Part(_returns_a_view)), act

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return (h + self.act(self.part(h))).sum()


def _returns_a_view(part: Part, h: Tensor) -> Tensor:
    return h[:] if h.mean() < 9 else h


def test_a_view_of_its_input_may_be_read_but_not_written_to() -> None:
    capture(Writes(torch.exp), {"x": torch.randn(6, 4)})
    with pytest.raises(CaptureError, match="returns what it is given, or a view of that, and one"):
        capture(Writes(torch.exp_), {"x": torch.randn(6, 4)})
