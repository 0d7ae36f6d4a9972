"""What devices of unlike types send each other, on two emulated nodes with a slow link between them.

Messages are held against the slower of copy and wire (`messages`), collectives against their price (`composed`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.fleet import in_fleet, run_workers, worker_parser, write_result
from benchmarks.kit.report import Bar, Row, finish
from benchmarks.transport import composed, messages
from hetu_fx_emulate.emulate import EmulateSpec


@dataclass(frozen=True)
class Part:
    """One part: the speeds of its ranks, the link, what each of them does in so many rounds, and how that is judged."""

    speeds: tuple[float, ...]
    link_bits_per_second: float
    work: Callable[[int], Any]
    judge: Callable[[Sequence[Any]], tuple[list[Bar], list[Row]]]


PARTS = {
    "messages": Part((0.7, 0.7), messages.LINK_BITS_PER_SECOND, messages.work, messages.judge),
    "composed": Part((0.45,) * 4, composed.LINK_BITS_PER_SECOND, composed.work, composed.judge),
}


def main() -> int:
    """Run under the emulator and judge."""
    made = worker_parser("transport", __doc__ or "")
    made.add_argument("--part", choices=PARTS, action="append", help="only this one; all")
    options = made.parse_args()
    names = options.part or list(PARTS)
    if options.worker is not None:
        return work(PARTS[names[0]], options.worker, 3 if options.quick else 7)
    bars, rows = [], []
    for name in names:
        part, arguments = PARTS[name], ["--part", name, *["--quick"] * options.quick]
        spec = EmulateSpec(speeds=part.speeds, num_nodes=2, link_bits_per_second=part.link_bits_per_second)
        more = part.judge(run_workers("transport", arguments, spec, timeout_seconds=600))
        bars, rows = bars + more[0], rows + more[1]
    sizes = {"message_bytes": messages.MESSAGE_BYTES, "tensor_bytes": composed.TENSOR_BYTES}
    return finish("transport", bars, rows, **sizes)


def work(part: Part, result: Path, rounds: int) -> int:
    """Be one rank."""
    torch.set_num_threads(1)
    with in_fleet():
        write_result(result, part.work(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
