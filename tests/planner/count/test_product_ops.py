"""What blocks keep of which only some ops are computed again: as a run keeps it, and chosen where it is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.price.fitting import fit_recompute
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.recomputed import RECOMPUTED_OPS
from hetu_fx.program.program import Program
from tests.model_zoo import SAMPLES
from tests.transforms.cases import LENGTH, batch_of
from tests.transforms.lowering.test_recompute import ONE, OPS, Kept, again, trained
from tests.transforms.plans import program_of

SLOW = [1e6]  # so that products take nearly all of the time
CLUSTER = Cluster.on_paper(SLOW)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def case(request: pytest.FixtureRequest) -> tuple[str, Program, ProgramCosts]:
    program = program_of(SAMPLES[request.param].model().train(), batch_of(request.param, LENGTH))
    return request.param, program, program_costs(program)


def test_every_choice_is_known(case: tuple[str, Program, ProgramCosts]) -> None:
    assert set(case[2].recompute_choices) == set(RECOMPUTED_OPS)
    assert case[2].recompute_choices == OPS
    assert replace(case[2], memory=None).recompute_choices == ("all",)
    profile = Profile(case[2])
    assert Profile.from_json(profile.to_json()) == profile


def test_as_much_is_counted_as_a_run_keeps(case: tuple[str, Program, ProgramCosts]) -> None:
    name, program, costs = case
    model, batch = SAMPLES[name].model().train(), batch_of(name, LENGTH)
    rows, none = next(iter(batch.values())).shape[0], Kept()
    trained(program, model, batch, ONE, kept=none)
    for ops in OPS:
        kept = Kept()
        trained(program, model, batch, again(ONE, 2, ops), kept=kept)
        (stage,) = again(ONE, 2, ops).pipelines[0].stages
        counted = [memory.footprint(0, costs.num_blocks, 1.0).kept(rows) for memory in (costs, costs.kept_by(stage, 0))]
        assert counted[0] - counted[1] == pytest.approx(none.at_the_end - kept.at_the_end, rel=0.1)


def test_fewer_ops_take_less_time_and_keep_more(case: tuple[str, Program, ProgramCosts]) -> None:
    costs = case[2]
    plain = predict(ONE.with_blocks(costs.num_blocks), costs, CLUSTER)
    found = [predict(again(ONE, 2, ops).with_blocks(costs.num_blocks), costs, CLUSTER) for ops in OPS]
    seconds = [plain.seconds, *(one.seconds for one in found)]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == len(seconds)
    held = [dict(one.devices[0].bytes)["activations"] for one in (plain, *found)]
    assert held == sorted(held, reverse=True)


def test_a_stage_recomputes_what_lets_it_fit_in_least_time(case: tuple[str, Program, ProgramCosts]) -> None:
    costs = replace(case[2], rows=256)
    plan, options = ONE.with_blocks(costs.num_blocks), PlanOptions(memory_fraction=1.0)
    choices = [again(plan, count, ops) for ops in OPS for count in range(costs.num_blocks + 1)]
    priced = {choice: predict(choice, costs, CLUSTER) for choice in choices}
    chosen = set()
    for limit in sorted({prediction.devices[0].total_bytes for prediction in priced.values()}):
        found = fit_recompute(plan, costs, Cluster.on_paper(SLOW, memory_bytes=limit), options)
        assert found is not None
        fits = [one for one in priced.values() if one.devices[0].total_bytes <= limit]
        assert found.prediction.seconds == min(one.seconds for one in fits)
        chosen.add(found.plan.pipelines[0].stages[0].recompute_ops)
    assert {"pointwise", "all"} <= chosen
