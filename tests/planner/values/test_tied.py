import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.count.count import program_costs
from hetu_fx.planner.values.tied import Tied, gradients_of, pending_of
from tests import model_zoo
from tests.planner.programs import uncut

TABLE = Tied(100, 40, (0, 3))


def test_a_group_holds_what_is_split_in_shares() -> None:
    assert TABLE.at(0.25) == 60 + 10


def test_a_stage_counts_it_besides_only_where_it_lacks_the_first_reader() -> None:
    assert [TABLE.is_extra(*parts) for parts in ((0, 4), (0, 2), (1, 3), (2, 4))] == [False, False, False, True]
    assert [TABLE.is_shared(*parts) for parts in ((0, 4), (0, 2), (1, 3), (2, 4))] == [False, True, False, True]


def test_the_last_reader_makes_the_gradient_first() -> None:
    assert gradients_of([110, 7, 8, 9], [TABLE], 0, 1.0) == [10, 7, 8, 109]
    assert gradients_of([110, 7], [TABLE], 0, 1.0) == [110, 7]
    assert gradients_of([8, 9], [TABLE], 2, 0.5) == [8, 9 + 80]


def test_gradients_wait_from_the_last_reader_of_a_stage_to_its_first() -> None:
    assert pending_of([TABLE], 0, 4, 1.0) == [100, 100, 100, 0]
    assert pending_of([TABLE], 0, 2, 1.0) == pending_of([TABLE], 2, 2, 1.0) == [0, 0]


@pytest.mark.parametrize(("split", "readers"), [(101, (0, 1)), (0, (0,)), (0, (1, 0)), (0, (0, 0))])
def test_what_cannot_be_is_refused(split: float, readers: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="tied parameter"):
        Tied(100, split, readers)


def test_tied_embeddings_are_held_by_the_first_and_the_last_stage() -> None:
    _, graph = model_zoo.captured("gpt2")
    costs = program_costs(**uncut(graph), memory=False)
    (tied,) = costs.tied
    assert tied.readers == (0, costs.num_blocks + 1)
    first, last = costs.stage(0, 1), costs.stage(1, costs.num_blocks)
    assert first.parameter_bytes + last.parameter_bytes == costs.whole.parameter_bytes + tied.bytes
