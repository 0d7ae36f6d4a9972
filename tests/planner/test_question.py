"""Files that do not go together are refused before anything is searched."""

from __future__ import annotations

import pytest

from hetu_fx.errors import ClusterError, ProfileError
from hetu_fx.planner.question import check_kinds, check_rates
from hetu_fx.planner.values.profile_file import BlockTime, Profile, Slowdown
from tests.planner.examples import paper, transformer


def test_a_rate_below_1_is_refused() -> None:
    check_rates(paper(4, 4).with_rates({1: 1.0}))
    with pytest.raises(ClusterError, match=r"device 1 has rate 0.5, but a straggling rate is 1 .healthy. or more"):
        check_rates(paper(4, 4).with_rates({1: 0.5}))


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (Profile(transformer(), times=(BlockTime("gpus", 1, 0.0, 1e-6),)), "times of kind 'gpus'"),
        (Profile(transformer(), alpha=(Slowdown("gpus", {1: 2.0}),)), "alpha of kind 'gpus'"),
    ],
)
def test_figures_of_a_kind_that_no_device_has_are_refused(profile: Profile, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        check_kinds(profile, paper(4, 4))
    check_kinds(Profile(transformer(), times=(BlockTime("paper", 1, 0.0, 1e-6),)), paper(4, 4))
