"""Which workers the launcher ends, and why: of what it has heard of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetu_fx.launch.spec import LaunchSpec, WorkerProcess, spelled


def verdicts(
    workers: Sequence[WorkerProcess], spec: LaunchSpec, now: float, failed_at: float | None
) -> Iterator[tuple[WorkerProcess, str]]:
    """Yield workers that are stopped, stuck, or do not leave their groups, and what is said of each.

    `now` and `failed_at` (when the run under way failed; None while it goes well) are times of time.monotonic.
    """
    running = [worker for worker in workers if worker.state in ("running", "done")]
    for worker in workers:
        silent = now - worker.last_sign
        if worker.state not in ("starting", "gone") and silent > spec.stopped_seconds:
            yield worker, f"{worker.name} has given no sign of life for {silent:.1f} s{spelled(worker.wait)}"
    if failed_at is None:
        yield from _missing(running, spec.stuck_seconds)
    elif now - failed_at > spec.grace_seconds:
        yield from ((worker, f"{worker.name} did not leave its groups{spelled(worker.wait)}") for worker in running)


def _missing(running: Sequence[WorkerProcess], seconds: float) -> Iterator[tuple[WorkerProcess, str]]:
    """Yield those whom others have waited for so long; all that wait, where all do."""
    stuck = [worker for worker in running if worker.wait is not None and worker.wait[1] > seconds]
    others = [worker for worker in running if worker.wait is None or worker.wait[1] < seconds / 2]
    for worker in (others or stuck) if stuck else ():
        yield worker, f"{stuck[0].name}{spelled(stuck[0].wait)}, and {worker.name} does not come"
