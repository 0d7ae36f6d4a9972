"""What is wrong with a question to the planner before anything is searched: files that do not go together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetu_fx.base.documents import nearest
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import ClusterError, ProfileError
from hetu_fx.planner.values.profile_file import Profile


def check_rates(cluster: Cluster) -> None:
    """Raise `ClusterError` for a device that takes less time than it should, which no straggling rate can say."""
    for device in cluster.devices:
        if device.rate < 1:
            raise ClusterError(
                f"device {device.rank} has rate {device.rate:g}, but a straggling rate is 1 (healthy) or more: 2 takes "
                f"twice as long as it should\nhint: for a faster device give more flops_per_second"
            )


def check_kinds(profile: Profile, cluster: Cluster) -> None:
    """Raise `ProfileError` where the profile tells of a kind that no device has: it would be of no use, unseen."""
    kinds = sorted({device.kind for device in cluster.devices})
    _check("times", (time.kind for time in profile.times), kinds)
    _check("alpha", (alpha.kind for alpha in profile.alpha), kinds)


def _check(key: str, told: Iterable[str], kinds: Sequence[str]) -> None:
    for kind in told:
        if kind not in kinds:
            raise ProfileError(
                f"the profile has {key} of kind {kind!r}, but no device of the cluster is of that kind"
                f"{nearest(kind, kinds)}\nhint: name it as the cluster does, or take them out"
            )
