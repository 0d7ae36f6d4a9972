"""Models in which rows meet pay for it with every replica."""

from dataclasses import replace

import pytest

from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.errors import PlanError, ProfileError
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.price.step import predict
from hetu_fx.planner.simulate.simulate import simulate
from hetu_fx.planner.values.exchanged_values import (
    NO_ROW_SUMS,
    RowSums,
    TiedParameter,
    gradient_bytes,
    pending_gradient_bytes,
)
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.part_costs import PartCosts
from hetu_fx.planner.values.profile_file import PROGRAM
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan
from hetu_fx.program.captures import Programs
from tests import model_zoo
from tests.model_zoo import SAMPLES
from tests.planner.programs import uncut

LINK = Link(1e9, 1e-4)
COSTS = ProgramCosts(16, PartCosts(flops=1e8, parameter_bytes=1e6), (), PartCosts())
SUMMED = replace(COSTS, row_sums=RowSums(20, 8e5))


def test_each_is_an_all_reduce_and_a_meeting_of_all_replicas() -> None:
    cluster = Cluster.on_paper([1e9] * 3, intra=LINK, meeting_seconds=[1e-3, 2e-3, 5e-3])
    assert SUMMED.row_sums.seconds((0, 1), cluster) == pytest.approx(20 * (2 * 2e-3 + 2 * (1e-4 + 2e4 / 1e9)))
    assert SUMMED.row_sums.seconds((0,), cluster) == NO_ROW_SUMS.seconds((0, 1, 2), cluster) == 0.0


def test_prediction_and_simulation_count_them_for_replicas_only() -> None:
    cluster = Cluster.on_paper([1e9, 1e9], intra=LINK)
    lost = SUMMED.row_sums.seconds((0, 1), cluster)
    for plan, expected in ((Plan.single(0), 0.0), (Plan.data_parallel((0, 1)), lost)):
        found, without = (predict(plan, costs, cluster).seconds for costs in (SUMMED, COSTS))
        assert found - without == pytest.approx(expected)
        found, without = (simulate(plan, costs, cluster).seconds for costs in (SUMMED, COSTS))
        assert found - without == pytest.approx(expected)


def test_a_replica_that_costs_more_in_sums_than_it_gains_gets_no_rows() -> None:
    cluster = Cluster.on_paper([1e9, 1e9, 5e8], intra=LINK, meeting_seconds=[1e-3, 1e-3, 2e-2])
    options = PlanOptions.of_program(mixes_rows=True)
    assert make_plan(COSTS, cluster, options=options).devices == (0, 1, 2)
    assert make_plan(SUMMED, cluster, options=options).devices == (0, 1)


def test_a_batch_norm_has_sums_forward_and_backward_and_a_llama_none() -> None:
    for name, has_some in (("conv", True), ("llama", False)):
        sample = SAMPLES[name]
        program = Programs(sample.model(), None).first(sample.batch(4, 9), training=True)
        assert bool(program.summed_over_rows) == program.mixes_rows == has_some


def test_a_profile_file_has_them() -> None:
    written = PROGRAM.write(SUMMED)
    assert written["row_sums"] == {"count": 20, "bytes": 8e5}
    assert "row_sums" not in PROGRAM.write(COSTS)
    assert PROGRAM.read(written, "p: program") == SUMMED
    with pytest.raises(ProfileError, match="count"):
        RowSums(-1)


TABLE = TiedParameter(100, 40, (0, 3))


def test_a_group_holds_what_is_split_in_shares() -> None:
    assert TABLE.at(0.25) == 60 + 10


def test_a_stage_counts_it_besides_only_where_it_lacks_the_first_reader() -> None:
    assert [TABLE.is_extra(*parts) for parts in ((0, 4), (0, 2), (1, 3), (2, 4))] == [False, False, False, True]
    assert [TABLE.is_shared(*parts) for parts in ((0, 4), (0, 2), (1, 3), (2, 4))] == [False, True, False, True]


def test_the_last_reader_makes_the_gradient_first() -> None:
    assert gradient_bytes([110, 7, 8, 9], [TABLE], 0, 1.0) == [10, 7, 8, 109]
    assert gradient_bytes([110, 7], [TABLE], 0, 1.0) == [110, 7]
    assert gradient_bytes([8, 9], [TABLE], 2, 0.5) == [8, 9 + 80]


def test_gradients_wait_from_the_last_reader_of_a_stage_to_its_first() -> None:
    assert pending_gradient_bytes([TABLE], 0, 4, 1.0) == [100, 100, 100, 0]
    assert pending_gradient_bytes([TABLE], 0, 2, 1.0) == pending_gradient_bytes([TABLE], 2, 2, 1.0) == [0, 0]


@pytest.mark.parametrize(("split", "readers"), [(101, (0, 1)), (0, (0,)), (0, (1, 0)), (0, (0, 0))])
def test_what_cannot_be_is_refused(split: float, readers: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="tied parameter"):
        TiedParameter(100, split, readers)


def test_tied_embeddings_are_held_by_the_first_and_the_last_stage() -> None:
    _, graph = model_zoo.captured("gpt2")
    costs = program_costs(**uncut(graph), memory=False)
    (tied,) = costs.tied
    assert tied.readers == (0, costs.num_blocks + 1)
    first, last = costs.stage(0, 1), costs.stage(1, costs.num_blocks)
    assert first.parameter_bytes + last.parameter_bytes == costs.whole.parameter_bytes + tied.bytes
