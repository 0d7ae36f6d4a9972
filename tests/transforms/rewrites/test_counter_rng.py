"""Random ops become draws by counter: parts of a batch see their part of the whole batch's masks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetu_fx.check.verdict import judge
from hetu_fx.deduction.factors.analyse import analyse
from hetu_fx.graph.capture import capture
from hetu_fx.graph.graph import Graph, LeafKind, OutputKind
from hetu_fx.lockstep import Lockstep
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.rewrites.counter_rng import Randomness, draws_by_token
from tests.graph.compare import assert_same_as_eager, run_on_one_device
from tests.model_zoo import SAMPLES, captured, to_double

aten = torch.ops.aten


def state(row: int = 0, step: int = 0) -> dict[str, torch.Tensor]:
    return {"random_state": torch.tensor([7, step, row])}


@functools.cache
def rewritten(name: str) -> tuple[nn.Module, Graph]:
    model, graph = captured(name)
    return model, Randomness()(graph)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_no_op_draws_from_a_generator_any_more(name: str) -> None:
    _, graph = rewritten(name)
    targets = {node.target for node in graph.graph.nodes}
    drawing = {t for t in targets if torch.Tag.nondeterministic_seeded in getattr(t, "tags", ())}
    assert drawing <= {aten.scaled_dot_product_attention.default}
    assert not any(node.kwargs.get("dropout_p") for node in graph.graph.nodes)
    assert len(graph.leaves_of(LeafKind.RANDOM_STATE)) == 1
    assert not any("depend on the plan" in note for note in graph.notes)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
def test_rows_on_their_own_get_the_masks_of_the_whole_batch(name: str) -> None:
    model, graph = rewritten(name)
    batch = to_double(SAMPLES[name].batch(7, 11))
    whole = run_on_one_device(graph, model, batch, state())[OutputKind.VALUE, "logits"]
    pieces = {key: value.split([3, 1, 3]) for key, value in batch.items()}
    for i, row in enumerate((0, 3, 4)):
        part = {key: value[i] for key, value in pieces.items()}
        logits = run_on_one_device(graph, model, part, state(row))[OutputKind.VALUE, "logits"]
        assert torch.allclose(logits, whole[row : row + len(logits)], rtol=1e-10, atol=1e-12)


def test_steps_have_different_masks() -> None:
    model, graph = rewritten("gpt2")
    batch = SAMPLES["gpt2"].batch(3, 11)
    losses = [run_on_one_device(graph, model, batch, state(step=step)) for step in (0, 1, 0)]
    first, second, again = (out[OutputKind.LOSS, "loss"].item() for out in losses)
    assert first == again
    assert first != second


def test_graphs_that_draw_nothing_get_no_state() -> None:
    _, graph = rewritten("llama")
    assert not graph.leaves_of(LeafKind.RANDOM_STATE)


class Body(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = body
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * self.scale)


DRAWS = {
    "channels": lambda x: F.dropout1d(x, 0.4),
    "alpha": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "rand": lambda x: x + torch.rand(x.shape[0], 3, 1),
    "randn": lambda x: x + torch.randn(x.shape[0], 1, 4),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "bernoulli_p": lambda x: x * torch.empty_like(x).bernoulli_(0.3),
    "normal_": lambda x: x + torch.empty_like(x).normal_(1.0, 2.0),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1.0, 1.0),
    "flattened": lambda x: F.dropout(x.reshape(-1, 4), 0.4).reshape(x.shape),
    "transposed": lambda x: F.dropout(x.transpose(0, 1), 0.4).transpose(0, 1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_depends_on_the_row_alone(name: str) -> None:
    model = Body(DRAWS[name]).double()
    graph = Randomness()(capture(model, (torch.randn(6, 3, 4, dtype=torch.float64),)))
    assert not graph.notes
    x = torch.randn(5, 3, 4, dtype=torch.float64)

    def run(part: torch.Tensor, row: int) -> torch.Tensor:
        return run_on_one_device(graph, model, (part,), state(row))[OutputKind.VALUE, "output"]

    whole = run(x, 0)
    assert not torch.equal(whole, x)
    assert torch.allclose(torch.cat([run(x[:2], 0), run(x[2:], 2)]), whole)


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [
        ("randn_like", 0, 1),
        ("normal_", 1, 2),
        ("uniform_", 0, 3**-0.5),
        ("rand_like", 0.5, 12**-0.5),
        ("alpha", 0, 0),
    ],
)
def test_distributions_have_torchs_moments(name: str, mean: float, deviation: float) -> None:
    model = Body(DRAWS[name]).double()
    graph = Randomness()(capture(model, (torch.zeros(6, 300, 400, dtype=torch.float64),)))
    x = torch.zeros(2, 300, 400, dtype=torch.float64)
    drawn = run_on_one_device(graph, model, (x,), state())[OutputKind.VALUE, "output"]
    wanted = model(x) if name == "alpha" else None
    assert abs(drawn.mean() - (mean if wanted is None else wanted.mean())) < 0.02
    assert abs(drawn.std() - (deviation if wanted is None else wanted.std())) < 0.02


class Attention(nn.Module):
    def __init__(self, p: float, **options: object) -> None:
        super().__init__()
        self.p, self.options = p, options
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            q * self.scale, k, k * self.scale, attn_mask=mask, dropout_p=self.p, **self.options
        )
        return out.pow(2).sum()


def bool_mask(rows: int) -> torch.Tensor:
    mask = torch.rand(rows, 1, 7, 9) > 0.3
    mask[0, 0, 2] = False
    return mask


def float_mask(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 1, 7, 9, dtype=torch.float64).masked_fill(~bool_mask(rows), -torch.inf)


ATTENTIONS = {
    "plain": ({}, 6, None),
    "causal": ({"is_causal": True}, 6, None),
    "scaled": ({"scale": 0.7}, 6, None),
    "grouped": ({"enable_gqa": True}, 3, None),
    "bool_mask": ({}, 6, bool_mask),
    "float_mask": ({}, 6, float_mask),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_written_out_attention_equals_torchs(name: str) -> None:
    """With a dropout so rare that it never happens, so that both give the same numbers."""
    options, heads, mask = ATTENTIONS[name]

    def batch(rows: int) -> dict[str, torch.Tensor]:
        q = torch.randn(rows, 6, 7, 8, dtype=torch.float64)
        k = torch.randn(rows, heads, 9, 8, dtype=torch.float64)
        return {"q": q, "k": k} | ({"mask": mask(rows)} if mask else {})

    graph = Randomness()(capture(Attention(1e-15, **options), batch(5)))
    assert not any(node.target is aten.scaled_dot_product_attention.default for node in graph.graph.nodes)
    assert_same_as_eager(Attention(0.0, **options).double(), graph, batch(3), 1e-12, state())


def test_unknown_draws_are_noted() -> None:
    model = Body(lambda x: x + torch.poisson(x.exp()))
    graph = Randomness()(capture(model, (torch.randn(6, 3, 4),)))
    assert any("poisson" in note and "depend on the plan" in note for note in graph.notes)


def test_rules_let_every_factor_pass_through_a_draw() -> None:
    _, graph = rewritten("gpt2")
    factors = analyse(graph)
    drops = [node for node in graph.graph.nodes if node.target is torch.ops.hetu.dropout.default]
    assert len(drops) == 7
    for node in drops:
        op = factors.op(node)
        assert op.known
        assert op.operands[0].dims == factors.dims(node)
        own = {cls for dim in factors.dims(node) for cls in dim}
        assert op.whole & own <= factors.repeated  # query and key positions are one class


@pytest.mark.parametrize("flat", [False, True])
def test_draws_that_count_tokens_over_rows_depend_on_the_length_of_rows(flat: bool) -> None:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x.flatten(0, 1) if flat else x, 0.5).sum()

    assert draws_by_token(Randomness()(capture(Dropped(), {"x": torch.ones(4, 6, 8)}))) is flat


KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Recurrent(nn.Module):
    def __init__(self, kind: str, dropout: float, both_ways: bool = False) -> None:
        super().__init__()
        self.layers = KINDS[kind](3, 4, num_layers=2, dropout=dropout, batch_first=True, bidirectional=both_ways)

    def forward(self, x: Tensor) -> Tensor:
        values, states = self.layers(x)
        last = states[1] if isinstance(states, tuple) else states
        return values.square().mean() + last.square().mean()


@pytest.mark.parametrize(("kind", "both_ways"), [("lstm", False), ("gru", True), ("rnn", False)])
def test_layers_one_by_one_make_what_all_make_at_once(kind: str, both_ways: bool) -> None:
    example = (torch.randn(5, 4, 3, dtype=torch.float64),)
    graph = Randomness()(capture(Recurrent(kind, 1e-15, both_ways).double(), example))
    assert not graph.notes
    assert sum("input" in str(node.target) for node in graph.graph.nodes if node.op == "call_function") == 2
    model, batch = Recurrent(kind, 0.0, both_ways).double(), (torch.randn(3, 4, 3, dtype=torch.float64),)
    assert_same_as_eager(model, graph, batch, 1e-12, {"random_state": torch.tensor([7, 0, 0])})


def test_layers_without_dropout_stay_one_op_and_draw_nothing() -> None:
    graph = Randomness()(capture(Recurrent("gru", 0.0), (torch.randn(5, 4, 3),)))
    assert not graph.notes
    assert sum("input" in str(node.target) for node in graph.graph.nodes if node.op == "call_function") == 1


def test_dropout_between_layers_is_the_same_under_every_plan() -> None:
    torch.manual_seed(0)
    model, batches, how = Recurrent("rnn", 0.4).double(), [(torch.randn(8, 4, 3, dtype=torch.float64),)] * 2, Lockstep()
    alone, made = (how.train(model, batches, plan) for plan in (Plan.single(0), Plan.data_parallel((0, 1), (3, 1))))
    assert judge("rows", alone, made, 1e-10, "").verdict == "equal"
