"""Units on paper: which parameters belong together, who reads them when, and where a module is marked."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch import nn

from hetu_fx.errors import PlanError
from hetu_fx.plans.plan import Plan
from hetu_fx.transforms.lowering.block_modules import BlockModules
from hetu_fx.transforms.lowering.recomputing_module import RecomputingModule
from hetu_fx.transforms.lowering.units import UnitPlan, Units, plan_units
from hetu_fx.transforms.show import show_stage
from hetu_fx.transforms.specialize.device_graph import SlotKind
from hetu_fx.transforms.specialize.specialize import Specialize
from tests.switching.step.unit_models import batch, plain, words
from tests.transforms.plans import deduced, program_of


def units_of(model: nn.Module) -> UnitPlan:
    sizes = {name: p.numel() * p.itemsize for name, p in model.named_parameters()}
    return plan_units(program_of(model, batch()).graph, sizes)


def test_blocks_are_units_and_so_is_what_is_before_and_after() -> None:
    plan = units_of(words())
    assert [{name.rpartition(".")[0].split(".")[0] for name in unit} for unit in plan.units] == [
        {"embedding"},
        *[{"blocks"}] * 3,
        {"mixes", "head"},
    ]
    assert plan.visits == tuple(frozenset({unit}) for unit in range(5))
    assert plan.begun_at == [(0,), (1,), (2,), (3,), (4,)]
    assert list(plan.slots) == [0, 1, 0, 1, 0]


def test_a_tied_weight_belongs_to_its_first_reader_and_is_there_for_the_last() -> None:
    plan = units_of(words(tied=True))
    assert plan.unit_of["embedding.weight"] == 0
    assert plan.visits[-1] == {0, 4}
    assert plan.begun_at[-1] == (4,)
    assert plan.slots[0] not in (plan.slots[3], plan.slots[4], plan.slots[1])


def test_units_that_meet_late_have_buffers_of_their_own() -> None:
    """Two units that are each read early, far from each other, and together later."""
    visits = tuple(map(frozenset, ({0}, {1}, {2}, {3}, {0, 2}, {1, 3})))
    slots = UnitPlan(tuple((f"w{unit}",) for unit in range(4)), (8,) * 4, visits).slots
    for one, following in pairwise(visits):
        assert len({slots[unit] for unit in one | following}) == len(one | following)


def test_a_model_without_blocks_is_cut_by_bytes() -> None:
    model = plain()
    plan = units_of(model)
    assert sum(plan.num_bytes) == sum(p.numel() * p.itemsize for p in model.parameters())
    assert ("second.weight", "second.bias") in plan.units or ("second.weight",) in [unit[:1] for unit in plan.units]
    assert 3 <= len(plan.units) == len(plan.visits)
    assert plan.visits[-1] == {0, len(plan.units) - 1}


@pytest.mark.parametrize("make", [words, plain])
def test_a_module_gathers_before_a_piece_reads_and_lets_go_after(make: type[nn.Module]) -> None:
    model = make()
    plan, made = units_of(model), deduced(program_of(model, batch()), Plan.data_parallel(2))
    device = Specialize(0)(made)
    assert device is not None
    names = tuple(slot.name if slot.kind is SlotKind.PARAMETER else None for slot in device.slots)
    numbers = tuple(None if name is None else plan.unit_of[name] for name in names)
    cut = BlockModules(made.annotated.graph.block_paths, numbers)(RecomputingModule()(device))
    marked = Units(plan, names)(cut)
    lines = [line for line in show_stage(marked).splitlines() if "hetu." in line or "piece_" in line.split("=")[-1]]
    outer = lines[: next((i for i, line in enumerate(lines) if line.startswith("piece")), len(lines))]
    gathered = [line for line in outer if "hetu.parameters" in line]
    assert [f"hetu.parameters(units, {visit}, " in line for visit, line in enumerate(gathered)] == [True] * len(
        plan.visits
    )
    assert sum("hetu.release" in line for line in outer) == len(plan.visits)
    assert "hetu." not in show_stage(cut)


def test_readers_in_an_order_of_their_own_are_refused() -> None:
    plan = UnitPlan((("a",), ("b",)), (8, 8), (frozenset({0}), frozenset({1})))
    assert plan.visit(["b"], 0) == 1
    with pytest.raises(PlanError, match=r"reads \['a'\] in another order"):
        plan.visit(["a"], 1)


def test_the_first_visit_of_what_is_trained_is_where_gradients_end() -> None:
    plan = UnitPlan((("a",), ("b",), ("c",)), (8, 8, 8), (frozenset({0}), frozenset({1}), frozenset({0, 2})))
    assert [plan.first_of([name]) for name in "abc"] == [0, 1, 2]
    assert plan.first_of([]) == 3
