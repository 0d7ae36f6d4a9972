import pytest

from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.searches import DEFAULT, SEARCHES, find_search
from tests.planner.examples import paper, transformer


def test_every_search_is_found_by_its_name_and_says_when_it_applies() -> None:
    for name in SEARCHES:
        assert find_search(name).name == name
        assert find_search(name).applies
    assert DEFAULT in SEARCHES


def test_a_name_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"unknown search 'maleus' \(did you mean 'malleus'\?\)"):
        find_search("maleus")


def test_the_default_is_what_is_asked_without_a_name() -> None:
    costs, cluster = transformer(), paper(4, 2)
    assert make_plan(costs, cluster) == make_plan(costs, cluster, search=DEFAULT)


def test_many_devices_are_not_gone_through_one_by_one() -> None:
    with pytest.raises(PlanError, match="it tries all runs of up to 16 devices, but there are 17\nhint: use 'auto'"):
        make_plan(transformer(), paper(*[1] * 17), search="contiguous")
