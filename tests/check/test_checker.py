"""A plan is tried before it trains: what is wrong is told with the op, and what was not tried is told too."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hetu_fx.check import checker as module
from hetu_fx.comm_ops.ops import table
from hetu_fx.deduction.rules.registry import register_rule, unregister_rule
from hetu_fx.errors import CheckError
from hetu_fx.plans.plan import Plan
from hetu_fx.program.tracer import Tracer
from hetu_fx.switching.eager.row_mode import BY_ROWS, RowMode
from hetu_fx.switching.step import batches
from tests.check.nets import GROUP, SHARES, STAGES, Contrast, Mlp, Tokens, checker_of, graph_of, mlp_batch, tokens_batch

PLANTED = "hetu_planted::share"


@torch.library.custom_op(PLANTED, mutates_args=())
def share(x: Tensor) -> Tensor:
    """Return each number's share of its row."""
    return x / x.abs().sum(-1, keepdim=True)


@share.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    (x,) = ctx.saved_tensors
    total = x.abs().sum(-1, keepdim=True)
    return gradient / total - x.sign() * (gradient * x).sum(-1, keepdim=True) / total**2


share.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Shares(nn.Module):
    """Has an op of its own between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.second(share(self.first(x))), labels)


class GoesByDtype(Tokens):
    """Computes something else in float64."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels) * (2 if self.head.weight.dtype is torch.float64 else 1)


@pytest.fixture
def wrong_rule() -> Iterator[None]:
    register_rule("hetu_planted.share.default", "... k -> ... k")  # it needs whole rows
    yield
    unregister_rule("hetu_planted.share.default")


@pytest.mark.parametrize("plan", [SHARES, STAGES], ids=["replicas", "stages"])
def test_what_is_right_is_told_with_what_was_cut(plan, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    says = checker_of(Tokens(), tokens_batch(), tmp_path).try_plan(plan).says
    assert says.startswith("checked: loss and 11 gradients are those of the module on one device to "), says
    assert "2 of 5 blocks" in says


@pytest.mark.parametrize(
    ("model", "captures"),
    [(Tokens, 1), (GoesByDtype, 2)],
    ids=["made of the model's program", "captured as its program differs"],
)
def test_a_small_case_is_captured_where_the_models_program_does_not_show_it(
    model: type[Tokens], captures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, trace = [], Tracer._traced
    monkeypatch.setattr(Tracer, "_traced", lambda self, *given: found.append(self) or trace(self, *given))
    says = checker_of(model(), tokens_batch(), tmp_path).try_plan(SHARES).says
    assert says.startswith("checked: loss and 11 gradients are those of the module on one device to "), says
    assert len(found) == captures


def test_a_wrong_rule_is_found_with_the_op_and_its_line(tmp_path: Path, wrong_rule: None) -> None:
    with pytest.raises(CheckError) as raised:
        checker_of(Shares(), mlp_batch(), tmp_path).try_plan(GROUP)
    said = str(raised.value)
    assert "the loss is" in said
    assert "the first value that differs is that of hetu_planted.share.default at test_checker.py:" in said
    case = json.loads(said.partition("case: ")[2])
    assert case["inputs"] == {"x": "float64[4, 6]", "labels": "int64[4]"}
    assert case["versions"]["torch"] == torch.__version__


def test_a_wrong_adjoint_is_found_with_the_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = table.call

    def call(name: str, gradient: Tensor, *args: object) -> Tensor:
        return right(name, gradient, *args) * 1.5

    monkeypatch.setattr(table, "call", call)

    class Deeper(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 6)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return super().forward(self.before(x), labels)

    with pytest.raises(
        CheckError, match=r"all values are right: on the way back, .* 'second.weight', which aten.linear"
    ):
        checker_of(Deeper(), mlp_batch(), tmp_path).try_plan(GROUP)


def test_a_wrong_count_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = batches._counts
    monkeypatch.setattr(batches, "_counts", lambda *given: tuple(count + 1 for count in right(*given)))
    with pytest.raises(CheckError, match="the loss is"):
        checker_of(Mlp(), mlp_batch(), tmp_path).try_plan(SHARES)


def test_a_crash_of_the_ranks_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise IndexError("no such piece")

    monkeypatch.setattr(batches, "_counts", broken)
    with pytest.raises(CheckError, match="its ranks do not go through a step: IndexError: no such piece"):
        checker_of(Mlp(), mlp_batch(), tmp_path).try_plan(SHARES)


class Remembers(Mlp):
    """Goes by a number in a file, which nobody sees."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = str(file)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with open(self.file, "r+b") as file:
            calls = len(file.read())
            file.write(b".")
        loss: Tensor = super().forward(x, labels)
        return loss * (1 + calls)


def test_state_that_nobody_sees_is_found_by_a_second_step(tmp_path: Path) -> None:
    (tmp_path / "calls").write_bytes(b"")
    with pytest.raises(CheckError, match=r"the loss(.|\n)*second equal step(.|\n)*hint: keep it in a buffer"):
        checker_of(Remembers(tmp_path / "calls"), mlp_batch(), tmp_path / "kept").try_plan(SHARES)


def test_what_was_found_is_kept_for_the_same_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = mlp_batch()
    says = checker_of(Mlp(), batch, tmp_path).try_plan(SHARES).says
    monkeypatch.setattr(module, "run_trial", None)  # nothing is tried again
    assert checker_of(Mlp(), batch, tmp_path).try_plan(SHARES).says == says


def test_what_is_wrong_is_tried_again(tmp_path: Path, wrong_rule: None) -> None:
    for _ in range(2):
        with pytest.raises(CheckError):
            checker_of(Shares(), mlp_batch(), tmp_path).try_plan(GROUP)
    assert not list(tmp_path.glob("*.json"))


def test_another_rule_is_another_question(tmp_path: Path) -> None:
    checker = checker_of(Shares(), mlp_batch(), tmp_path)
    assert checker.program is not None
    before = checker._key(GROUP, checker.program)
    register_rule("hetu_planted.share.default", "... k -> ... k")
    try:
        assert checker._key(GROUP, checker.program) != before
    finally:
        unregister_rule("hetu_planted.share.default")


def test_a_model_that_is_too_large_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_OF_MEMORY", 1e-9)
    says = checker_of(Mlp(), mlp_batch(), tmp_path).try_plan(SHARES).says
    assert says.startswith("not checked: no small case of the model runs: 92 numbers in the parameters"), says


def test_a_trial_ends_in_time(tmp_path: Path) -> None:
    says = checker_of(Mlp(), mlp_batch(), tmp_path, seconds=0.0).try_plan(SHARES).says
    assert says == "not checked: it would take more than 0 s"


def test_a_trial_for_which_no_time_is_left_is_no_error_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS_OF_OP", 1e3)
    assert checker_of(Mlp(), mlp_batch(), tmp_path).try_plan(SHARES).says.startswith("not checked: it would take about")


def test_a_model_that_cannot_be_copied_says_so(tmp_path: Path) -> None:
    model = Mlp()
    execution = graph_of(model, mlp_batch())
    model.lock = threading.Lock()
    checker = module.Checker(model, None, mlp_batch(), execution, world=2, shared=False, folder=tmp_path)
    says = checker.try_plan(SHARES).says
    assert says.startswith("not checked: the model cannot be copied: TypeError"), says


def test_an_eager_module_is_held_against_one_device(tmp_path: Path) -> None:
    says = checker_of(Mlp(), mlp_batch(), tmp_path, eager=True).try_plan(SHARES).says
    assert says.startswith("checked: loss and 4 gradients"), says


@pytest.mark.parametrize("plan", [SHARES, Plan.data_parallel((0, 1))])
def test_an_eager_loss_over_pairs_of_rows_needs_all_rows(plan: Plan, tmp_path: Path) -> None:
    batch = {"x": torch.randn(6, 6), "other": torch.randn(6, 6)}
    tried = checker_of(Contrast(), batch, tmp_path, eager=True).try_plan(plan)
    assert not tried.mode.by_rows
    assert re.search(r"^checked: .*each replica runs all rows, as by rows .*the loss is .*first.weight by", tried.says)


def test_an_eager_loss_that_adds_up_over_rows_is_tried_as_a_sum(tmp_path: Path) -> None:
    class Adds(Mlp):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return super().forward(x, labels) * len(x)

    tried = checker_of(Adds(), mlp_batch(), tmp_path, eager=True).try_plan(SHARES)
    assert tried.mode == RowMode(by_rows=True, adds_up=True)
    assert "a sum over rows, is shared out among ranks" in tried.says


def test_equal_shares_of_an_eager_module_are_tried_on_unlike_rows(tmp_path: Path) -> None:
    class Rooted(Mlp):  # equal replicas of half the rows each would not show it
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return super().forward(x, labels) * (1.0 if len(x) % 2 == 0 else 2.0)

    batch = mlp_batch(8)
    tried = checker_of(Rooted(), batch, tmp_path, eager=True).try_plan(Plan.data_parallel((0, 1)))
    assert not tried.mode.by_rows


@pytest.mark.parametrize("place", [0, 9, 19])
def test_an_eager_mean_over_tokens_of_which_one_row_has_fewer_needs_all_rows(place: int, tmp_path: Path) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)

        def forward(self, x: Tensor, kept: Tensor) -> Tensor:
            return (self.first(x).square().mean(-1) * kept).sum() / kept.sum()

    batch = {"x": torch.randn(20, 3, 6), "kept": torch.ones(20, 3)}
    batch["kept"][place, 1:] = 0
    tried = checker_of(Tokens(), batch, tmp_path, eager=True).try_plan(SHARES)
    assert not tried.mode.by_rows


def test_an_eager_module_that_takes_no_other_rows_than_all_gets_them(tmp_path: Path) -> None:
    class Whole(Mlp):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            if len(x) < 4:
                raise ValueError("too few rows")
            return super().forward(x, labels)

    tried = checker_of(Whole(), mlp_batch(), tmp_path, eager=True).try_plan(SHARES)
    assert not tried.mode.by_rows
    assert "too few rows" in tried.mode.why


def test_an_eager_module_that_runs_all_rows_and_differs_is_told(tmp_path: Path) -> None:
    class Strays(Mlp):
        calls = 0

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            Strays.calls += 1
            return super().forward(x, labels) * Strays.calls

    tried = checker_of(Strays(), mlp_batch(), tmp_path, eager=True).try_plan(SHARES)
    assert not tried.mode.by_rows
    assert re.search("^not checked: the small case is refused: replicas that all run the whole batch", tried.says)


def test_an_eager_module_that_draws_is_tried_without_dropout_or_on_all_rows(tmp_path: Path) -> None:
    class Dropped(Mlp):
        def __init__(self, noise: float) -> None:
            super().__init__()
            self.drop, self.noise = nn.Dropout(0.5), noise

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            x = x + torch.randn(x.shape) * self.noise if self.noise else x
            return super().forward(self.drop(x), labels)

    tried = [checker_of(Dropped(n), mlp_batch(), tmp_path, eager=True).try_plan(SHARES) for n in (0.0, 1.0)]
    assert all(one.says.startswith("checked: ") for one in tried)
    assert tried[0].mode == BY_ROWS
    assert "draws random numbers" in tried[1].mode.why


def test_a_module_that_draws_is_held_against_its_graph(tmp_path: Path) -> None:
    class Dropped(Mlp):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.5), labels)

    says = checker_of(Dropped(), mlp_batch(), tmp_path).try_plan(SHARES).says
    assert "those of the captured graph on one device, as the model draws random numbers" in says
