import pytest

from hetu_fx.planner.simulate.jobs import Jobs
from hetu_fx.planner.values.line import Line
from tests.planner.examples import paper


def test_devices_that_work_together_are_used_for_their_share_of_the_slowests_time() -> None:
    jobs = Jobs(paper(1, 1))
    number = jobs.do(jobs.compute("forward", {0: 2.0, 1: 1.0}), "forward 0", ())
    activity = jobs.all[number].activity
    assert (activity.seconds, activity.uses) == (2.0, {("compute", 0): 1.0, ("compute", 1): 0.5})


def test_a_transfer_takes_as_long_as_its_busiest_link() -> None:
    jobs = Jobs(paper(1, 1, 1))
    number = jobs.do(jobs.transfer("send", Line(0.5, 0.1), ((0, 1, 1e9), (0, 2, 1e10))), "send 0", ())
    activity = jobs.all[number].activity
    assert (activity.latency_seconds, activity.seconds) == (0.5, pytest.approx(1.1))
    assert activity.uses["in", 1] == pytest.approx(0.1 / 1.1)
    assert jobs.all[number].task.devices == (0,)
