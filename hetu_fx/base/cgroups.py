"""The cgroups that a process is in: how much time of cores and memory they let it have, and whom they have ended.

Reads only. Both versions of the hierarchies, in containers too.
"""

from __future__ import annotations

from pathlib import Path

_OF_V2 = ""  # the one hierarchy's line names no controller


def cgroup_quota(folder: Path) -> float | None:
    """Return the cores that a cgroup's quota is worth; None where it has none."""
    if (folder / "cpu.max").is_file():
        quota, _, period = read_text_file(folder / "cpu.max").partition(" ")
    else:
        quota, period = read_text_file(folder / "cpu.cfs_quota_us"), read_text_file(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def quota_within(mounts: str, own: str) -> float | None:
    """Return the least quota of the process's cgroups and of those around them, in cores; None where there is none.

    mounts: the text of /proc/self/mounts; own: the text of /proc/self/cgroup.
    """
    quotas = map(cgroup_quota, _around(mounts, own, "cpu"))
    return min((quota for quota in quotas if quota is not None), default=None)


def own_quota() -> float | None:
    """Return the cores that this process's quota is worth; None where it has none."""
    return quota_within(read_text_file(Path("/proc/self/mounts")), read_text_file(Path("/proc/self/cgroup")))


def memory_limits_within(mounts: str, own: str) -> tuple[tuple[str, int], ...]:
    """Return (cgroup, bytes) of the process's memory cgroup and those around it, of those that have a limit."""
    limits = [(str(folder), _memory_limit_of(folder)) for folder in _around(mounts, own, "memory")]
    return tuple((name, limit) for name, limit in limits if limit is not None)


def _memory_limit_of(folder: Path) -> int | None:
    """Return a cgroup's limit, or None for no file, `max`, or version 1's "no limit" near 2**63."""
    text = read_text_file(folder / "memory.max") or read_text_file(folder / "memory.limit_in_bytes")
    limit = int(text) if text.isdigit() else None
    return None if limit is None or limit >= 1 << 60 else limit


def memory_left_within(mounts: str, own: str) -> tuple[tuple[str, int], ...]:
    """Return (cgroup, bytes) of the same cgroups as `memory_limits_within`: what each has left of its limit.

    Pages of files that have not been used for a while are given back when memory is asked for: they count as left.
    """
    limits = {folder: _memory_limit_of(folder) for folder in _around(mounts, own, "memory")}
    return tuple((str(f), max(0, limit - _memory_used(f))) for f, limit in limits.items() if limit is not None)


def _memory_used(folder: Path) -> int:
    used = read_text_file(folder / "memory.current") or read_text_file(folder / "memory.usage_in_bytes")
    pages = dict(line.split() for line in read_text_file(folder / "memory.stat").splitlines())
    return int(used or 0) - int(pages.get("total_inactive_file") or pages.get("inactive_file") or 0)


def count_memory_kills(folder: Path) -> int:
    """Return how many processes of a memory cgroup the kernel has killed as memory ran out; 0 where it does not say."""
    lines = (read_text_file(folder / "memory.events") or read_text_file(folder / "memory.oom_control")).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


class MemoryKills:
    """Which of some processes the kernel has killed as memory ran out, by the counts of their cgroups."""

    def __init__(self) -> None:
        self._cgroups: dict[int, Path] = {}
        self._accounted: dict[Path, int] = {}

    def watch(self, process: int) -> None:
        """Note the memory cgroup of a process while it lives: of one that has ended, version 1 does not tell."""
        proc = Path("/proc")
        for folder in _around(
            read_text_file(proc / "self/mounts"), read_text_file(proc / str(process) / "cgroup"), "memory"
        )[:1]:
            self._cgroups[process] = folder
            self._accounted.setdefault(folder, count_memory_kills(folder))

    def cgroup_of(self, process: int) -> Path | None:
        """Return the cgroup of a process that was killed, if the kernel has killed there as memory ran out.

        A count is of any process of the cgroup, and stands for one of those that are asked for.
        """
        folder = self._cgroups.pop(process, None)
        if folder is None or count_memory_kills(folder) <= self._accounted[folder]:
            return None
        self._accounted[folder] += 1
        return folder


def _around(mounts: str, own: str, controller: str) -> list[Path]:
    """Return the process's cgroup that has a controller and those around it, up to where the hierarchy is mounted."""
    root = _v1_root(mounts, controller)
    if root is None:
        root, controller = v2_root(mounts), _OF_V2
    if root is None:
        return []
    folder = _folder(root, own, controller)
    return [folder, *(above for above in folder.parents if above.is_relative_to(root))]


def _v1_root(mounts: str, controller: str) -> Path | None:
    """Find where a controller's hierarchy of version 1 is mounted."""
    points = (point for point, kind, options in _mounts(mounts) if kind == "cgroup" and controller in options)
    return next(map(Path, points), None)


def v1_folder(mounts: str, own: str, controller: str) -> Path | None:
    """Find the process's cgroup in the hierarchy of a controller."""
    root = _v1_root(mounts, controller)
    return None if root is None else _folder(root, own, controller)


def v2_root(mounts: str) -> Path | None:
    """Find where the one hierarchy of version 2 is mounted."""
    return next((Path(point) for point, kind, _ in _mounts(mounts) if kind == "cgroup2"), None)


def read_text_file(path: Path) -> str:
    """Return what a file says, nothing if there is none."""
    return path.read_text().strip() if path.is_file() else ""


def _folder(root: Path, own: str, controller: str) -> Path:
    rows = [line.split(":", 2) for line in own.splitlines()]
    path = next((path for _, names, path in rows if controller in names.split(",")), "/")
    # In a container the path is often the host's, not to be seen from inside: then the mount is ours.
    inside = root / path.lstrip("/")
    return inside if inside.is_dir() else root


def _mounts(text: str) -> list[tuple[str, str, list[str]]]:
    rows = [line.split() for line in text.splitlines()]
    return [(row[1], row[2], row[3].split(",")) for row in rows if len(row) >= 4]
