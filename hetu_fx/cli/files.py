"""The cluster file and the profile file of a question, and what options change in the profile."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import PlanError

if TYPE_CHECKING:
    from hetu_fx.planner.values.profile_file import Profile

NAMES = ("rows", "dtype", "optimizer", "master")
"""Options that change a profile."""


def add_files(parser: argparse.ArgumentParser) -> None:
    """Declare the options that name the files, and those that change the profile."""
    parser.add_argument("--cluster", metavar="FILE", help="devices and links to plan for (hetu_fx.cluster/1)")
    parser.add_argument("--profile", metavar="FILE", help="what the model costs (hetu_fx.profile/1)")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of the global batch (default: the profile's)")
    parser.add_argument("--dtype", metavar="TYPE", help="parameters are of this type, like bf16 (default: profile)")
    parser.add_argument("--optimizer", metavar="NAME", help="what keeps states, like adamw (default: profile)")
    parser.add_argument("--master", action="store_const", const="fp32", help="the optimizer updates a copy in fp32")


def read_files(options: argparse.Namespace, what: str) -> tuple[Profile, Cluster]:
    """Return what the files say, as the options have it; `what` needs both.

    Raises `PlanError` for a file that is not named, and what is wrong with a file or with both together.
    """
    if options.cluster is None or options.profile is None:
        missing = "cluster" if options.cluster is None else "profile"
        raise PlanError(f"{what} for a cluster and a profile\nhint: give --{missing} FILE too")
    from hetu_fx.planner.measure.fit import calibrate_from_profile
    from hetu_fx.planner.question import check_kinds, check_rates
    from hetu_fx.planner.values.profile_file import Profile

    profile = _with_state(Profile.read(options.profile), options)
    if options.rows is not None:
        profile = profile.with_rows(options.rows)
    cluster = Cluster.read(options.cluster)
    check_rates(cluster)
    check_kinds(profile, cluster)
    return profile, calibrate_from_profile(cluster, profile)


def _with_state(profile: Profile, options: argparse.Namespace) -> Profile:
    """Return the profile with what the options say of parameters; the optimizer keeps as much as it usually does."""
    asked = {name: getattr(options, name) for name in ("dtype", "optimizer", "master") if getattr(options, name)}
    return profile.with_state(replace(profile.state, slots=None, **asked)) if asked else profile
