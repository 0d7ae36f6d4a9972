"""The captured graph is the model: same loss, outputs, gradients and buffers at every size."""

from __future__ import annotations

import copy
import gc
import linecache
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import fx, nn

from hetu_fx.errors import CaptureError, StateError
from hetu_fx.graph import meta
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import LeafKind, OutputKind
from tests.graph.compare import assert_same_as_eager, run_on_one_device
from tests.model_zoo import SAMPLES, captured, to_double
from tests.program.flat_memory import environments, sources

aten = torch.ops.aten


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(("rows", "length"), [(5, 11), (4, 17), (1, 9)])
def test_graph_equals_eager_at_any_batch_size_and_length(name: str, rows: int, length: int) -> None:
    model, graph = captured(name)
    batch = to_double(SAMPLES[name].batch(rows, length))
    tolerance = 1e-6 if name == "mixtral" else 1e-12
    assert_same_as_eager(model, graph, batch, tolerance)


@pytest.mark.parametrize("name", SAMPLES)
def test_graph_is_flat_functional_and_free_of_asserts(name: str) -> None:
    _, graph = captured(name)
    assert {node.op for node in graph.graph.nodes} == {"placeholder", "call_function", "output"}
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable
            assert "assert" not in str(node.target)


@pytest.mark.parametrize("name", SAMPLES)
def test_batch_is_one_symbol_over_all_inputs(name: str) -> None:
    _, graph = captured(name)
    sizes = {meta.expression(meta.shape(leaf.node)[0]) for leaf in graph.leaves_of(LeafKind.INPUT)}
    assert sizes == {graph.batch_symbol}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_parameter_is_one_leaf_with_the_users_names(name: str) -> None:
    model, graph = captured(name)
    leaves = graph.leaves_of(LeafKind.PARAMETER)
    assert {leaf.name for leaf in leaves} == {fqn for fqn, _ in model.named_parameters()}
    aliases = {alias for leaf in leaves for alias in (leaf.name, *leaf.aliases)}
    assert aliases == {fqn for fqn, _ in model.named_parameters(remove_duplicate=False)}


def test_tied_weights_are_one_leaf_with_an_alias() -> None:
    _, graph = captured("gpt2")
    leaf = next(leaf for leaf in graph.leaves if leaf.name == "transformer.wte.weight")
    assert leaf.aliases == ("lm_head.weight",)
    assert len(leaf.node.users) == 2


def test_output_container_is_built_again_and_what_is_left_out_says_so() -> None:
    model, graph = captured("llama")
    output = graph.rebuild({"loss": torch.tensor(1.0)})
    assert type(output) is type(model(**SAMPLES["llama"].batch(2, 5)))
    assert output.loss.item() == 1.0
    with pytest.raises(StateError, match="output 'logits' was not brought back"):
        output.logits.argmax(-1)


def test_unknown_output_objects_are_dropped_and_noted() -> None:
    _, graph = captured("llama")
    assert any("DynamicCache" in note for note in graph.notes)  # its key is another one since transformers 5.24


def test_model_batch_and_random_state_are_not_changed() -> None:
    model = SAMPLES["conv"].model().eval()
    model.stem[1].train()
    batch = SAMPLES["conv"].batch(3, 0)
    before = copy.deepcopy((model.state_dict(), batch))
    flags = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    capture(model, batch, training=True)
    assert flags == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    for old, new in zip(before, (model.state_dict(), batch), strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parts_that_the_user_froze_stay_frozen() -> None:
    model = SAMPLES["conv"].model().train()
    model.stem[1].eval()
    updates = capture(model, SAMPLES["conv"].batch(3, 0)).outputs_of(OutputKind.BUFFER_UPDATE)
    assert {leaf.name.rpartition(".")[0] for leaf, _ in updates} == {"body.1"}


def test_one_tensor_passed_twice_stays_two_inputs() -> None:
    ids = torch.randint(0, 97, (5, 11))
    model, _ = captured("llama")
    graph = capture(model, {"input_ids": ids, "labels": ids})
    assert all(leaf.node.users for leaf in graph.leaves_of(LeafKind.INPUT))
    assert_same_as_eager(model, graph, SAMPLES["llama"].batch(3, 7), 1e-12)


def test_example_of_one_row_still_gives_a_dynamic_batch() -> None:
    model, _ = captured("llama")
    graph = capture(model, SAMPLES["llama"].batch(1, 11))
    assert graph.batch_symbol is not None
    assert_same_as_eager(model, graph, SAMPLES["llama"].batch(4, 6), 1e-12)


def test_example_batch_differs_from_all_other_sizes() -> None:
    model, _ = captured("llama")
    graph = capture(model, SAMPLES["llama"].batch(11, 11))
    rows, length = meta.hints(graph.leaves_of(LeafKind.INPUT)[0].node)
    assert length == 11
    assert rows not in (1, 3, 6, 8, 11, 24, 48, 97, 112)


def test_model_on_the_meta_device_is_captured() -> None:
    with torch.device("meta"):
        model = SAMPLES["llama"].model()
    graph = capture(model, SAMPLES["llama"].batch(5, 11))
    assert graph.num_blocks == 2
    assert graph.batch_symbol is not None


def test_evaluation_has_no_dropout() -> None:
    model = SAMPLES["gpt2"].model()
    graph = capture(model, SAMPLES["gpt2"].batch(5, 11), training=False)
    assert not any(node.target is aten.dropout.default for node in graph.graph.nodes)


def test_blocks_of_encoder_and_decoder_are_concatenated() -> None:
    _, graph = captured("t5")
    assert graph.block_paths == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")
    loss = graph.loss
    assert loss is not None
    assert graph.block_of(loss) is None
    assert graph.position(loss) == 3


def test_loss_function_is_captured_too() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    def loss_fn(scores: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(scores, y)

    model, batch = Scores(), {"x": torch.randn(5, 6), "y": torch.randn(5, 3)}
    graph = capture(model, batch, loss_fn=loss_fn)
    assert [(leaf.name, leaf.kind) for leaf in graph.outputs] == [("output", "value"), ("loss", "loss")]
    out = run_on_one_device(graph, model, batch)
    assert torch.equal(out[OutputKind.LOSS, "loss"], loss_fn(model(**batch), **batch))


def test_loss_function_may_be_a_module_with_weights() -> None:
    model, weight = nn.Linear(6, 3), torch.tensor([1.0, 2.0, 0.5])
    loss_fn = nn.CrossEntropyLoss(weight=weight)
    batch = {"input": torch.randn(5, 6)}
    labels = torch.tensor([0, 1, 2, 2, 1])
    graph = capture(model, batch, loss_fn=lambda output, input: loss_fn(output, labels[: len(input)]))
    assert {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)} == {"weight", "bias"}
    assert any(torch.equal(value, weight) for value in graph.constants.values())
    out = run_on_one_device(graph, model, batch)
    assert torch.allclose(out[OutputKind.LOSS, "loss"], loss_fn(model(**batch), labels))


def test_loss_module_itself_may_be_the_loss_function() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(3.0))

        def forward(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
            return (output * self.scale).pow(2).mean()

    model, batch = nn.Linear(6, 3), {"input": torch.randn(5, 6)}
    graph = capture(model, batch, loss_fn=Loss())
    assert [leaf.name for leaf in graph.leaves_of(LeafKind.BUFFER)] == []
    out = run_on_one_device(graph, model, batch)
    assert torch.allclose(out[OutputKind.LOSS, "loss"], Loss()(model(**batch), **batch))


def test_trainable_loss_modules_are_refused() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
            return (output * self.scale).pow(2).mean()

    with pytest.raises(CaptureError, match=r"trainable.*shape \(\).*not a parameter of the model"):
        capture(nn.Linear(6, 3), {"input": torch.randn(5, 6)}, loss_fn=Loss())


def test_a_loss_fn_that_returns_more_than_one_number_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"loss_fn returns a tensor of shape .* one real number for the whole batch"):
        capture(nn.Linear(6, 3), {"input": torch.randn(5, 6)}, loss_fn=lambda output, input: output.pow(2).mean(1))


def test_an_output_named_loss_of_more_than_one_number_is_an_output_like_others() -> None:
    class PerRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.linear(x).pow(2).mean(1)}

    assert capture(PerRow(), {"x": torch.randn(5, 6)}).loss is None


def test_gradient_checkpointing_is_captured_as_if_it_were_not_there() -> None:
    model = SAMPLES["llama"].model().double().train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    graph = capture(model, SAMPLES["llama"].batch(5, 11))
    assert_same_as_eager(model, graph, SAMPLES["llama"].batch(3, 7), 1e-12)


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda loss, x: loss, ["loss"]),
        (lambda loss, x: (loss, x), ["0", "1"]),
        (lambda loss, x: {"x": x, "loss": loss}, ["x", "loss"]),
        (lambda loss, x: OrderedDict(loss=loss, more=[x, (x, None)]), ["loss", "more.0", "more.1.0"]),
    ],
)
def test_loss_is_found_in_usual_outputs(wrap: object, names: list[str]) -> None:
    class Wrapped(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return wrap(x.pow(2).mean(), x * 2)  # type: ignore[operator]

    graph = capture(Wrapped(), (torch.randn(4, 6),))
    assert [leaf.name for leaf in graph.outputs] == names
    assert graph.loss is not None


def test_nested_batches_and_plain_values_are_allowed() -> None:
    class Nested(nn.Module):
        def forward(self, pair: list, scale: float, extra: None = None) -> torch.Tensor:
            return (pair[0] * scale + pair[1]["b"]).sum()

    batch = {"pair": [torch.randn(4, 3), {"b": torch.randn(4, 3)}], "scale": 2.0, "extra": None}
    graph = capture(Nested(), batch)
    assert [leaf.name for leaf in graph.leaves] == ["pair.0", "pair.1.b"]
    out = run_on_one_device(graph, Nested(), batch)
    assert torch.equal(out[OutputKind.LOSS, "loss"], Nested()(**batch))


def test_fixed_batch_falls_back_with_the_line_that_fixes_it() -> None:
    class Contrastive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x @ x.t()
            if x.shape[0] == 5:
                scores = scores * 2
            return scores.sum()

    graph = capture(Contrastive(), (torch.randn(5, 6),))
    assert graph.batch_symbol is None
    line = next(number for number, text in enumerate(open(__file__), 1) if "x.shape[0] == 5" in text)
    assert any(f"the batch size is fixed by the model at test_capture.py:{line}" in note for note in graph.notes)


def test_a_batch_fixed_by_a_loop_over_its_rows_is_noted_with_its_line() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[row].sum() for row in range(len(x))]).mean()

    graph = capture(Counts(), (torch.randn(5, 6),))
    assert any("test_capture.py:" in note for note in graph.notes)


def test_a_length_of_which_a_number_is_made_leaves_the_batch_open() -> None:
    class Clamps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            largest = torch.sqrt(torch.tensor(x.size(1)))
            return x.clamp(-float(largest) / 4, float(largest) / 4).mean()

    model, x = Clamps(), torch.randn(4, 6)
    graph = capture(model, (x,))
    assert graph.batch_symbol is not None
    assert any("every size but the batch is fixed by the model" in note for note in graph.notes)
    out = run_on_one_device(graph, model, (torch.cat([x, x]),))
    assert torch.equal(out[OutputKind.LOSS, "loss"], model(torch.cat([x, x])))


def test_error_names_line_reason_and_way_out() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                return x
            return x * 2

    with pytest.raises(CaptureError, match=r'(?s)test_capture.py:\d+.*goes on either way.*capture="eager"'):
        capture(Branches(), (torch.randn(4, 3),))


def test_error_in_forward_names_its_line() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    with pytest.raises(CaptureError, match=r"test_capture.py:\d+: .*RuntimeError"):
        capture(Broken(), (torch.randn(4, 3),))


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).squeeze() + self.layer(x).squeeze(0)[:, 0]


def test_squeezing_drops_the_dims_that_it_dropped_when_traced() -> None:
    model = Squeezed()
    graph = capture(model, (torch.randn(5, 4),))
    x = torch.randn(1, 4)
    (output,) = run_on_one_device(graph, model, (x,)).values()
    torch.testing.assert_close(output, model.layer(x)[:, 0] * 2)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return torch.cat([y.new_full((2, 4), 3.0), y, y.new_zeros(1, 4)]) + y.new_ones(())


def test_constants_do_not_read_the_tensors_that_lend_their_dtype() -> None:
    model, x = Padded().double(), torch.randn(5, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    constants = (aten.full.default, aten.zeros.default, aten.ones.default)
    assert [node.all_input_nodes for node in graph.graph.nodes if node.target in constants] == [[], [], []]
    (output,) = run_on_one_device(graph, model, (x,)).values()
    torch.testing.assert_close(output, model(x))


def test_captures_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(nn.Linear(3, 2), (torch.randn(4, 3),))


class OnlyFive(nn.Module):
    """Fixes its batch, which takes a capture several traces, the first of which fail."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean() * (2.0 if x.shape[0] == 5 else 1.0)


@pytest.mark.parametrize("model", [nn.Linear(3, 2), OnlyFive()])
def test_traces_leave_nothing_behind_whether_they_succeed_or_not(model: nn.Module) -> None:
    batch = (torch.randn(5, 3),)
    capture(model, batch)
    before = environments(), sources()
    for _ in range(3):
        capture(model, batch)
        assert environments() <= before[0]
        assert sources() <= before[1]


def test_the_source_of_a_graph_is_there_for_tracebacks_as_long_as_the_graph() -> None:
    capture(nn.Linear(3, 2), (torch.randn(5, 3),))
    graph = fx.symbolic_trace(nn.Linear(3, 2))
    name = graph.forward.__func__.__code__.co_filename
    assert "linear(" in "".join(linecache.getlines(name))
    del graph
    gc.collect()
    assert linecache.getlines(name) == []
