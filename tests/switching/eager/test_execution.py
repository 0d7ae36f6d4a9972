"""The module as it is, in a world of one, and what can be said without one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import hetu_fx
from hetu_fx.annotations.annotation import Annotation
from hetu_fx.errors import BatchError, CaptureError, ExportError, HetuFxError, PlanError, StateError
from hetu_fx.graph.containers import Constant, Entries, TensorSlot
from hetu_fx.graph.row_dims import AskedRowDims
from hetu_fx.plans.plan import Pipeline, Plan, Stage
from hetu_fx.switching.eager.execution import EagerExecution
from hetu_fx.switching.eager.module import OutputForm, Spec, common_form, eager_routes
from hetu_fx.switching.step.rows import plan_rows
from tests.switching.eager.models import Choosy, Predicts, Told, batch, make, squared_error


class Pictures(torch.nn.Module):
    """Takes images as a detector does, of sizes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 2, 3)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([self.conv(image).mean() for image in images]).mean()


def parallel(model: Any, example: Any = None, **options: Any) -> Any:
    return hetu_fx.auto_parallelize(model, example or batch(5, 0), capture="eager", **options)


def step(model: Any, number: int, **how: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch(5, number, **how))["loss"]
    loss.backward()
    return loss.detach()


def test_a_model_that_cannot_be_captured_is_told_the_line_and_the_way_out() -> None:
    with pytest.raises(CaptureError, match=r"(?s)models\.py:\d+: .*capture=\"eager\""):
        hetu_fx.auto_parallelize(make(Choosy), batch(5, 0))


def test_training_the_module_as_it_is_equals_training_it_plainly() -> None:
    plain = make(Choosy)
    model = parallel(copy.deepcopy(plain), plan=Plan.single())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    for number in range(4):
        assert torch.equal(step(model, number), step(plain, number))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for home, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(home.detach(), parameter)


def test_a_layer_that_no_row_needs_gets_no_gradient() -> None:
    model = parallel(make(Choosy), plan=Plan.single())
    step(model, 1, deepest=2)
    assert model.rare.weight.grad is None
    assert model.body.weight.grad is not None


def test_gradients_are_accumulated_without_sync_and_with() -> None:
    plain = make(Choosy)
    model = parallel(copy.deepcopy(plain), plan=Plan.single())
    with model.no_sync():
        step(model, 1)
        assert model.body.weight.grad is not None  # it waits for who reads it, or for the next step
    step(model, 2, deepest=1)
    step(plain, 1)
    step(plain, 2, deepest=1)
    for home, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(home.grad, parameter.grad)


def test_frozen_parameters_stay_without_gradient() -> None:
    model = make(Choosy)
    model.body.requires_grad_(False)
    parallel(model, plan=Plan.single())
    step(model, 1)
    assert model.body.weight.grad is None
    assert model.first.weight.grad is not None


def test_outputs_on_one_device_may_be_anything() -> None:
    model = parallel(make(Told), plan=Plan.single(), outputs="all")
    loss, most, rows = model(**batch(4, 1))
    assert loss.requires_grad
    assert most.shape == ()
    assert rows == 4


def test_outputs_come_back_from_training_on_one_device_unless_the_loss_alone_is_asked_for() -> None:
    model = parallel(make(Choosy), plan=Plan.single())
    assert model(**batch(4, 1))["out"].shape == (4, 6)
    assert model.eval()(**batch(4, 1))["out"].shape == (4, 6)
    alone = parallel(make(Choosy), plan=Plan.single(), outputs="loss")
    with pytest.raises(StateError, match="output 'out' was not brought back"):
        alone(**batch(4, 1))["out"].sum()


def test_a_loss_fn_makes_the_loss_of_the_output() -> None:
    plain = make(Predicts)
    model = parallel(copy.deepcopy(plain), loss_fn=squared_error, plan=Plan.single())
    data = batch(5, 1)
    expected = squared_error(plain(**data), **data)
    assert torch.equal(model(**data).loss, expected)
    assert torch.equal(model.eval()(**data).output, plain(**data))


def test_a_loss_may_be_computed_outside() -> None:
    plain = make(Predicts)
    model = parallel(copy.deepcopy(plain), plan=Plan.single())
    data = batch(5, 1)
    for each in (plain, model):
        squared_error(each(**data), **data).backward()
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)


@pytest.mark.parametrize(
    "plan",
    [
        Plan.tensor_parallel((0, 1)),
        Plan((Pipeline((Stage((0,)), Stage((1,)))),)),
        Plan((Pipeline((Stage((0,)),), micro_batches=2),)),
    ],
    ids=["tensor parallel", "pipeline", "micro-batches"],
)
def test_plans_that_cut_the_module_are_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"one device in one micro-batch\nhint: use hetu_fx\.Plan\.data_parallel"):
        parallel(make(Choosy), plan=plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"compile": "inductor"}, r"call \.compile"), ({"seed": 3}, "torch.manual_seed"), ({"capture": "none"}, "graph")],
)
def test_options_for_graphs_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(StateError, match=said):
        hetu_fx.auto_parallelize(make(Choosy), batch(5, 0), **{"capture": "eager", "plan": Plan.single(), **options})


def test_there_is_nothing_to_export(tmp_path: Path) -> None:
    model = parallel(make(Choosy), plan=Plan.single())
    with pytest.raises(ExportError, match=r"capture='eager'.*\n.*model\.hetu\.save"):
        model.hetu.export(tmp_path / "export")
    assert not list(tmp_path.iterdir())


def test_inputs_must_have_equal_numbers_of_rows() -> None:
    model = parallel(make(Choosy), plan=Plan.single())
    with pytest.raises(BatchError, match=r"'depth': 4, 'target': 5, 'x': 5"):
        model(**{**batch(5, 1), "depth": torch.ones(4, dtype=torch.int64)})
    with pytest.raises(BatchError, match="does not fit the model's forward"):
        model(nonsense=1)


def test_a_loss_fn_must_give_a_scalar() -> None:
    model = parallel(make(Predicts), loss_fn=lambda output, **_: output, plan=Plan.single())
    with pytest.raises(BatchError, match=r"loss_fn gave a tensor of shape \(5, 6\)"):
        model(**batch(5, 1))


def form(rows: int, told: object = None, **values: tuple[int, ...]) -> OutputForm:
    specs = {name: Spec(shape, torch.float64) for name, shape in values.items()}
    tree = Entries(dict, ("told", *values), (Constant("told", told), *map(TensorSlot, values)))
    return OutputForm(tree, specs, "", torch.float64)


def routes(*forms: OutputForm, outputs_of: Plan | None = None) -> Any:
    plan = outputs_of or Plan.data_parallel((0, 1), (3, 1))
    return eager_routes(dict(enumerate(forms)), {"x": 0}, plan, plan_rows(plan, (2, 2), shared=False), shared=False)


def test_outputs_by_row_go_back_to_their_callers() -> None:
    (route,) = routes(form(3, out=(3, 7)), form(1, out=(1, 7)))
    assert route.shape == (4, 7)
    assert [route.source.local_shape(rank, (4, 7)) for rank in (0, 1)] == [(3, 7), (1, 7)]
    assert [route.target.local_shape(rank, (4, 7)) for rank in (0, 1)] == [(2, 7), (2, 7)]


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        ((form(3, norm=()), form(1, norm=())), r"output 'norm' .*\nhint: return one entry per row.*outputs=\"loss\""),
        ((form(3, out=(3, 7)), form(1, out=(1, 8))), "output 'out' has shapes"),
        ((form(3, told=3), form(1, told=1)), r"output 'told' is \{0: 3, 1: 1\} on ranks \[0, 1\]"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused_by_name(forms: tuple[OutputForm, ...], said: str) -> None:
    with pytest.raises(StateError, match=said):
        routes(*forms)


def test_replicas_must_return_the_same_structure() -> None:
    with pytest.raises(StateError, match=r"rank 0 made \(out .* rank 1 made \(other"):
        common_form({0: form(3, out=(3,)), 1: form(1, other=(1,))})
    told = common_form({0: form(3, told=3), 1: form(1, told=1)}).constants["told"]
    with pytest.raises(StateError, match=r"output 'told' .* differs between replicas"):
        f"{told:d}"


def test_a_single_replica_is_read_where_it_is() -> None:
    execution = EagerExecution(make(Choosy), None, batch(8, 0))
    assert set(execution.compute_annotations(Plan.single(2)).values()) == {Annotation.on((2,))}
    with pytest.raises(HetuFxError, match="another world"):
        execution.check(Plan.single(2), 2)


def test_a_model_that_is_converted_runs_in_its_new_precision() -> None:
    plain = make(Choosy)
    model = parallel(copy.deepcopy(plain), plan=Plan.single())
    for dtype in (torch.bfloat16, torch.float32):
        rows = {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch(5, 0).items()}
        losses = []
        for one in (plain, model):
            one.to(dtype).zero_grad()
            losses.append(one(**rows)["loss"])
            losses[-1].backward()
        assert torch.equal(losses[0].detach(), losses[1].detach())
        assert model.body.weight.grad.dtype is dtype


def test_entries_of_a_list_may_be_samples_and_are_cut_only_where_that_is_asked_for() -> None:
    images = {"images": [torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)]}
    replicas = Plan.data_parallel((0, 1))
    execution = EagerExecution(Pictures(), None, images)
    execution.check(Plan.single(), 1)
    with pytest.raises(PlanError, match=r"'images' is a list of tensors, .*\nhint: say row_dims=\{'images': 0\} if"):
        execution.check(replicas, 2)
    with pytest.raises(PlanError, match="'images' is a list of tensors"):  # whatever the plan, where batches differ
        execution.check_rows_are_known(2)
    EagerExecution(Pictures(), None, images, AskedRowDims({"images": 0})).check(replicas, 2)
    EagerExecution(Pictures(), None, images, shared=True).check(replicas, 2)  # nothing is put together
