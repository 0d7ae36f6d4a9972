from dataclasses import replace

from hetu_fx.planner.make_plan import make_plan
from hetu_fx.planner.profile_file import Profile
from hetu_fx.planner.search.every import every
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.search.table import find_search
from tests.planner.examples import paper, transformer

PROBLEM = Problem(Profile(transformer()), paper(4, 4, 2).with_rates({0: 2.0}))


def test_the_best_of_all_that_were_asked_is_taken() -> None:
    costs, cluster = PROBLEM.costs, PROBLEM.cluster
    found = [make_plan(costs, cluster, search=name) for name in ("homogeneous+contiguous", "malleus", "every")]
    seconds = [plan.predicted.seconds for plan in found if plan.predicted is not None]
    assert seconds[2] <= min(seconds) * 1.01
    assert "`malleus`" in find_search("every").applies


def test_a_search_that_lacks_something_is_not_asked() -> None:
    asked = find_search("malleus")
    lacking = replace(asked, lacks=lambda problem: "something")
    assert every([lacking]).find(PROBLEM) == {}
    assert every([lacking, asked]).find(PROBLEM) == asked.find(PROBLEM)
