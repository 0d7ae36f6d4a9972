"""The parity matrix: models x plans, each run on four kinds of batch, against one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hetu_fx.check.verdict import judge
from hetu_fx.lockstep import Trained
from hetu_fx.plans.op_regions import OpRegion
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.model_zoo import NO_DROPOUT, SAMPLES, Sample


class Mlp(nn.Module):
    """Layers without blocks, and without a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 24)
        self.second = nn.Linear(24, 14)
        self.third = nn.Linear(14, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.relu(self.first(x)))))


def mlp_batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 10, dtype=torch.float64), "target": torch.randn(rows, 5, dtype=torch.float64)}


def squared_error(output: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


PLAIN: Mapping[str, dict[str, Any]] = {**NO_DROPOUT, "mixtral": {"output_router_logits": False}}

MODELS: Mapping[str, Sample] = {"mlp": Sample("mlp", Mlp, mlp_batch), **SAMPLES}
LOSS_FNS: Mapping[str, Callable[..., torch.Tensor]] = {"mlp": squared_error}

# torch's grouped matrix product knows no float64, so that a mixture of experts runs in float32 altogether. The gradient
# of a key's bias is zero but for rounding (softmax does not see it), which AdamW divides by its epsilon of 1e-8.
TOLERANCES = {"mixtral": 2e-4, "vit": 5e-8}
DEFAULT_TOLERANCE = 1e-9


def check_equal(name: str, alone: Trained, made: Trained, model: str = "") -> None:
    """Assert that a training of a model under a plan is that of one device."""
    tolerance = TOLERANCES.get(model, DEFAULT_TOLERANCE)
    verdict = judge(name, alone, made, tolerance, "")
    assert all(step.most <= tolerance for step in verdict.steps), verdict
    # AdamW divides by the gradient's size, which makes rounding visible where gradients are nearly zero.
    assert verdict.parameter_difference <= 10 * tolerance, verdict


# So that a stage has blocks for several chunks, unevenly many.
DEEPER: Mapping[str, dict[str, Any]] = {
    **{model: {"num_hidden_layers": 5} for model in ("llama", "bert", "vit", "mixtral")},
    "gpt2": {"n_layer": 5},
}

DTYPES = {"mixtral": torch.float32}


def in_double() -> None:
    """Let transformers compute losses in the model's float64; it says `.float()`, whatever the dtype is.

    Rounding to float32 would hide differences a million times as large as those that are looked for.
    """
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def _one(*stages: Stage, rows: int = 1, micro_batches: int = 1) -> Pipeline:
    return Pipeline(stages, share=rows, micro_batches=micro_batches)


PLANS: Mapping[str, Plan] = {
    "1 device": Plan((_one(Stage((0,))),)),
    "DP 3:1": Plan((_one(Stage((0,)), rows=3), _one(Stage((1,)), rows=1))),
    "TP2": Plan((_one(Stage((0, 1))),)),
    "TP2 3:1": Plan((_one(Stage((0, 1), (3, 1))),)),
    "TP6": Plan((_one(Stage((0, 1, 2, 3, 4, 5))),)),  # llama's three key-value heads are shared by two devices each
    "rows 2:1, program": Plan((_one(Stage((0, 1), (2, 1), program=(OpRegion("*", "rows"),))),)),
    "TP2 2:1 sequence parallel": Plan((_one(Stage((0, 1), (2, 1))),), sequence_parallel=True),
    "PP2": Plan((_one(Stage((0,)), Stage((1,)), micro_batches=3),)),
    "PP2 x TP2": Plan((_one(Stage((0, 1)), Stage((2, 3)), micro_batches=2),), schedule="gpipe"),
    "TP2 + TP1": Plan((_one(Stage((0, 1)), rows=2), _one(Stage((2,)), rows=1))),
    "PP2 + PP1": Plan((_one(Stage((0,)), Stage((1,)), rows=2, micro_batches=2), _one(Stage((2,)), rows=1))),
    "TP2>TP1 + 1": Plan(
        (
            _one(Stage((0, 1), (2, 1)), Stage((2,)), rows=5, micro_batches=3),
            _one(Stage((3,)), rows=2, micro_batches=2),
        )
    ),
    "PP2 zero bubble": Plan((_one(Stage((0,)), Stage((1,)), micro_batches=4),), schedule="zero-bubble"),
    "TP2>TP1 + 1 zero bubble, recompute": Plan(
        (
            _one(Stage((0, 1), (2, 1), recompute=1), Stage((2,)), rows=5, micro_batches=3),
            _one(Stage((3,)), rows=2, micro_batches=2),
        ),
        schedule="zero-bubble",
    ),
    "PP2 interleaved": Plan((_one(Stage((0,)), Stage((1,)), micro_batches=4),), schedule="interleaved"),
    "TP2>TP1 + 1 interleaved, recompute": Plan(
        (
            _one(Stage((0, 1), (2, 1), recompute=2), Stage((2,)), rows=5, micro_batches=3),
            _one(Stage((3,)), rows=2, micro_batches=2),
        ),
        schedule="interleaved",
    ),
    "PP2 interleaved zero bubble": Plan(
        (_one(Stage((0,)), Stage((1,)), micro_batches=4),), schedule="zero-bubble", chunks=2
    ),
    "TP2>TP1 + 1 interleaved zero bubble, recompute": Plan(
        (
            _one(Stage((0, 1), (2, 1), recompute=2), Stage((2,)), rows=5, micro_batches=3),
            _one(Stage((3,)), rows=2, micro_batches=2),
        ),
        schedule="zero-bubble",
        chunks=2,
    ),
    "CP2 3:1": Plan.context_parallel((0, 1), (3, 1)),
    "CP2 3:1 ring": replace(Plan.context_parallel((0, 1), (3, 1)), attention="ring"),
    "CP2>TP1 + 1": Plan(
        (
            _one(Stage((0, 1), (3, 1), context=2), Stage((2,)), rows=5, micro_batches=3),
            _one(Stage((3,)), rows=2, micro_batches=2),
        )
    ),
    "TP2>TP2 sequence parallel": Plan(
        (_one(Stage((0, 1), (2, 1)), Stage((2, 3)), micro_batches=2),), sequence_parallel=True
    ),
    "TP2>CP2 3:1": Plan((_one(Stage((0, 1)), Stage((2, 3), (3, 1), context=2), micro_batches=3),)),
    "CP2 3:1 recompute": Plan((_one(Stage((0, 1), (3, 1), context=2, recompute=1)),)),
    "CP2 3:1 x TP2 2:1": Plan((_one(Stage((0, 1, 2, 3), (2, 1), context=2, context_ratios=(3, 1))),)),
    "CP2 x TP2 ring recompute": Plan(
        (_one(Stage((0, 1, 2, 3), context=2, recompute=1), micro_batches=2),), attention="ring"
    ),
    "CP2 x TP2>TP1 + 1": Plan(
        (
            _one(Stage((0, 1, 2, 3), (2, 1), context=2, context_ratios=(3, 1)), Stage((4,)), rows=3, micro_batches=2),
            _one(Stage((5,)), rows=1),
        )
    ),
    "DP 3:1 zero 2": Plan.data_parallel(2, (3, 1), zero=2),
    "DP 3:1 zero 3": Plan.data_parallel(2, (3, 1), zero=3),
    "TP2 + TP1 zero 3": Plan((_one(Stage((0, 1)), rows=2), _one(Stage((2,)), rows=1)), zero=3),
}


@dataclass(frozen=True)
class Step:
    """One training step's batch: its name, and the rows and sequence length it has."""

    name: str
    rows: int
    length: int


STEPS = (Step("even", 8, 11), Step("7 rows", 7, 11), Step("ignored labels", 6, 13), Step("length", 5, 9))


def make_model(name: str, **changes: Any) -> nn.Module:
    """Make a model, of other sizes where changes say so; the same on every rank."""
    torch.manual_seed(17)
    model = MODELS[name].model(**PLAIN.get(name, {}), **changes)
    return model.to(DTYPES.get(name, torch.float64)).train()


def make_batch(name: str, step: Step, number: int) -> dict[str, torch.Tensor]:
    """Make a batch; the same on every rank."""
    torch.manual_seed(100 + number)
    batch = MODELS[name].batch(step.rows, step.length)
    dtype = DTYPES.get(name, torch.float64)
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


@dataclass(frozen=True)
class Cell:
    """A model under a plan, with how batches are passed."""

    model: str
    plan: str
    data: str = "per_rank"

    @property
    def name(self) -> str:
        return f"{self.model} / {self.plan} / {self.data}"

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Return what its model has otherwise than those of other cells."""
        return DEEPER.get(self.model, {}) if PLANS[self.plan].chunks > 1 else {}

    @property
    def ranks(self) -> int:
        return max(PLANS[self.plan].devices) + 1


ALL_CELLS = tuple(Cell(model, plan) for model in MODELS for plan in PLANS)

# What each model is run under in every test run: each plan and each model at least twice, all hard pairs.
COVERING = (
    *(Cell("llama", plan) for plan in PLANS),
    *(
        Cell("gpt2", plan)
        for plan in ("DP 3:1", "TP2 3:1", "PP2", "TP2>TP1 + 1", "TP2 2:1 sequence parallel", "CP2 3:1", "TP2>CP2 3:1")
    ),
    Cell("gpt2", "CP2 3:1 x TP2 2:1"),
    *(Cell("mlp", plan) for plan in ("1 device", "DP 3:1", "TP2", "PP2 + PP1", "TP2>TP1 + 1")),
    Cell("mlp", "TP2 2:1 sequence parallel"),
    Cell("gpt2", "PP2 zero bubble"),
    Cell("t5", "PP2 zero bubble"),
    *(Cell(model, "PP2 interleaved zero bubble") for model in ("gpt2", "t5", "mixtral")),
    *(Cell(model, "PP2 interleaved") for model in ("mlp", "conv", "gpt2", "t5", "bert", "vit", "mixtral")),
    *(Cell("conv", plan) for plan in ("DP 3:1", "TP2 3:1", "TP2 + TP1", "PP2")),
    *(Cell("bert", plan) for plan in ("TP2 + TP1", "PP2 x TP2", "CP2 3:1", "CP2 3:1 x TP2 2:1")),
    *(Cell("vit", plan) for plan in ("TP2 3:1", "PP2 + PP1", "TP2 2:1 sequence parallel")),
    *(Cell("t5", plan) for plan in ("DP 3:1", "TP2", "PP2", "TP2>TP1 + 1")),
    *(Cell("mixtral", plan) for plan in ("DP 3:1", "TP2", "PP2 + PP1")),
    *(Cell(model, "DP 3:1 zero 3") for model in ("mlp", "conv", "gpt2", "t5", "bert", "vit", "mixtral")),
    Cell("llama", "TP2>TP1 + 1", "global"),
    Cell("gpt2", "TP2 + TP1", "global"),
)

# One cell for each way in which ranks meet, and for each model: what is exact as threads is so over gloo.
PROCESSES = (
    *(
        Cell("llama", plan)
        for plan in ("1 device", "DP 3:1", "TP6", "CP2 3:1 ring", "TP2>TP2 sequence parallel", "CP2 x TP2>TP1 + 1")
    ),
    Cell("gpt2", "CP2 3:1 x TP2 2:1"),
    Cell("gpt2", "rows 2:1, program"),
    Cell("gpt2", "TP2 + TP1", "global"),
    Cell("mlp", "PP2 + PP1"),
    *(Cell("conv", plan) for plan in ("TP2 + TP1", "PP2")),
    Cell("bert", "PP2 x TP2"),
    Cell("llama", "PP2 zero bubble"),
    Cell("gpt2", "PP2 interleaved"),
    Cell("t5", "PP2 interleaved"),
    Cell("llama", "TP2>TP1 + 1 interleaved, recompute"),
    Cell("llama", "PP2 interleaved zero bubble"),
    Cell("vit", "TP2 3:1"),
    Cell("t5", "TP2>TP1 + 1"),
    Cell("mixtral", "DP 3:1"),
    Cell("gpt2", "TP2 + TP1 zero 3"),
)

SHARING = [plan for plan in PLANS if "sequence parallel" in plan or "CP" in plan]
RECOMPUTING = [plan for plan in PLANS if "recompute" in plan]

# Combinations that are refused by name, with a word of the reason.
REFUSED: Mapping[tuple[str, str], str] = {
    **{
        ("conv", plan): "rows of the whole batch"
        for plan in ("PP2", "PP2 x TP2", "PP2 + PP1", "TP2>TP1 + 1", "PP2 zero bubble")
    },
    **{
        (model, plan): "would hold no operation"
        for model in ("mlp", "conv")
        for plan in ("PP2 interleaved", "PP2 interleaved zero bubble")
    },
    **{(model, plan): "no dim that its" for model in ("mlp", "conv") for plan in SHARING},
    **{(model, plan): "blocks, but holds 0" for model in ("mlp", "conv") for plan in RECOMPUTING},
    **{("mixtral", plan): "cannot share the sequence" for plan in SHARING if "CP" in plan},
    ("mixtral", "rows 2:1, program"): "which the op needs whole",
}
