"""Families on trial: what each comes to under each plan, in a process of its own, and the rows that tell it.

A family is trained by plain PyTorch, then captured, then run under plans. One that crashes or never ends costs the
others nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.families.cells import (
    AS_RANKS,
    COMPARED,
    PLANS,
    TORCH_COMPILE,
    NotTrainedError,
    Subject,
    is_within_limits,
)
from benchmarks.families.family import Family
from benchmarks.kit import report
from benchmarks.kit.forks import Tell, in_forks
from hetu_fx.errors import DivergedError, HetuFxError
from hetu_fx.lockstep import Lockstep

SECONDS_PER_CELL = 240.0
PLAIN, CAPTURED, YES = "plain", "captured", "yes"
RIGHT, WRONG, REFUSED, CRASH, NOT_PLAIN = "right", "wrong", "refused", "crash", "does not train plainly"
REASON_LENGTH = 160
LOCKSTEP = "lockstep"

Row = dict[str, str]
Record = Mapping[str, Any]
RunPlan = Callable[[Subject, str], Record]
Heard = Mapping[str, Record]
"""What a family has come to: plainly, captured, and under each plan."""

DIED: Record = {CRASH: "its process died, or took longer for a cell than it may"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a cell came to.

    Fields:
        kind: right, wrong, refused, crash, or that the model does not train plainly.
        mark: what its cell in the table says.
        reason: why it is not right, or what it is compared with where that is not plain PyTorch; else "".
    """

    kind: str
    mark: str
    reason: str = ""


def parser(name: str, purpose: str) -> argparse.ArgumentParser:
    """Make the parser of a benchmark of families."""
    made = report.parser(name, purpose)
    made.add_argument("--only", action="append", default=[], metavar="NAME", help="a family; may be repeated")
    made.add_argument("--plan", action="append", default=[], choices=list(PLANS), help="a plan; may be repeated")
    made.add_argument(
        "--seconds",
        type=float,
        default=SECONDS_PER_CELL,
        help="for a cell, after which a family is given up; the machine may have other work (default: %(default)s)",
    )
    made.add_argument("--log", type=Path, help="a file for what each cell came to, errors in full, one JSON a line")
    made.add_argument("--resume", action="store_true", help="take over the families that are in the log already")
    return made


@dataclass(frozen=True, slots=True)
class Way:
    """How families are tried.

    Fields:
        name: unique.
        work: tries one family under plans, and tells.
        processes: that this takes.
        silence: for how many times the seconds of a cell it may say nothing.
    """

    name: str
    work: Callable[[Family, Sequence[str], float, Tell], None]
    processes: int = 1
    silence: int = 1


def in_lockstep(how: Lockstep = AS_RANKS) -> Callable[[Family, Sequence[str], float, Tell], None]:
    """Return what tries a family as all ranks of one process."""

    def work(family: Family, plans: Sequence[str], seconds: float, tell: Tell) -> None:
        try_family(family, plans, how, lambda subject, plan: {"differences": subject.try_plan(plan)}, tell)

    return work


AS_EVER = Way(LOCKSTEP, in_lockstep())


def tried(
    families: Sequence[Family], plans: Sequence[str], options: argparse.Namespace, way: Way = AS_EVER
) -> dict[str, Heard]:
    """Try families, several at once; what an interrupted run has logged is taken over."""
    by_name = {family.name: family for family in families}
    known = {name: heard for name, heard in _logged(options, way).items() if name in by_name}
    left = [name for name in by_name if name not in known]

    def work(name: str, tell: Tell) -> None:
        way.work(by_name[name], plans, options.seconds, tell)

    for name, heard in in_forks(left, work, max(1, _at_once() // way.processes), way.silence * options.seconds):
        known[name] = dict(heard)
        _log(options.log, {"family": name, "way": way.name, "heard": known[name]})
        print(" | ".join(row_of(by_name[name], known[name], plans).values()), file=sys.stderr, flush=True)
    return {name: known[name] for name in by_name}


def _at_once() -> int:
    return len(os.sched_getaffinity(0))


def try_family(family: Family, plans: Sequence[str], how: Lockstep, run: RunPlan, tell: Tell) -> None:
    """Train a family plainly, capture it and run it under plans; tell what each came to."""
    try:
        subject = Subject(family, how)
    except Exception as error:  # whatever a model does when it is built or trained plainly is its row's reason
        tell((PLAIN, _failure(NOT_PLAIN, error)))
        return
    tell((PLAIN, {}))
    captured = attempt(lambda: {"unknown_ops": subject.capture()})
    tell((CAPTURED, captured))
    for plan in plans if "unknown_ops" in captured else ():
        tell((plan, attempt(partial(run, subject, plan))))


def attempt(work: Callable[[], Record]) -> Record:
    """Return what some work came to, which is its error where it has one."""
    start = perf_counter()
    try:
        record = work()
    except NotTrainedError as error:
        record = _failure(NOT_PLAIN, error)
    except DivergedError as error:  # ranks that do not agree are no refusal
        record = _failure(CRASH, error)
    except HetuFxError as error:
        record = _failure(REFUSED, error)
    except Exception as error:  # to be told, not to end the run
        record = _failure(CRASH, error)
    return {"seconds": perf_counter() - start, **record}


def _failure(kind: str, error: Exception) -> Record:
    return {kind: f"{type(error).__name__}: {error}", "trace": "".join(traceback.format_exception(error))}


def verdict(family: Family, heard: Heard, plan: str) -> Verdict:
    """Say what a cell came to; what was not heard of is what the family's process died of."""
    failed = _failed(heard, (PLAIN, CAPTURED, plan))
    if failed is not None:
        return failed
    differences = heard[plan]["differences"]
    found, apart = [differences[what] for what in COMPARED], differences.get(TORCH_COMPILE)
    if is_within_limits(differences, family.dtype):
        reference = "" if apart is None else f"{plan}: compared with torch.compile, {apart:.0e} from plain PyTorch"
        return Verdict(RIGHT, f"{max(found):.0e}", reference)
    return Verdict(WRONG, f"{WRONG} {max(found):.0e}", f"{plan}: differs by {max(found):.1e}")


def _failed(heard: Heard, steps: Sequence[str]) -> Verdict | None:
    """Say what the first of these steps that failed has failed by."""
    for step in steps:
        record = heard.get(step, DIED)
        kind = next((kind for kind in (NOT_PLAIN, REFUSED, CRASH) if kind in record), None)
        if kind is not None:
            place = f"{step}: " if step in PLANS else ""
            told = NOT_PLAIN if step == PLAIN else kind
            return Verdict(told, told, f"{place}{record[kind]}")
    return None


def row_of(family: Family, heard: Heard, plans: Sequence[str]) -> Row:
    """Lay out what a family came to; the first thing that is not right is the row's reason."""
    row = dict.fromkeys(("family", "kind", CAPTURED, "rules", *plans, "reason"), "")
    row |= {"family": family.name, "kind": family.kind}
    before = _failed(heard, (PLAIN, CAPTURED))
    if before is not None:
        return row | {CAPTURED: "no", "reason": shortened(before.reason)} | dict.fromkeys(plans, before.mark)
    unknown, found = heard[CAPTURED]["unknown_ops"], {plan: verdict(family, heard, plan) for plan in plans}
    reasons = (
        [f"no rule for {', '.join(unknown)}"] if unknown else [each.reason for each in found.values() if each.reason]
    )
    row |= {CAPTURED: YES, "rules": "no" if unknown else YES, "reason": shortened(next(iter(reasons), ""))}
    return row | {plan: each.mark for plan, each in found.items()}


def counted(reasons: Sequence[str]) -> Counter[str]:
    """Count reasons that are the same but for names, places and numbers."""
    return Counter(map(_kind_of, reasons))


def _kind_of(reason: str) -> str:
    line = " ".join(reason.split())
    for pattern, stands_for in (
        (r"'[^']*'", "'...'"),
        (r"\(?[\w/.<>-]+\.py:\d+\)?", "(line)"),
        (r"(?<=the model calls )\w+", "..."),
        (r"\b[us]\d+\b|\b\d+(\.\d+)?(e-?\d+)?\b", "N"),
    ):
        line = re.sub(pattern, stands_for, line)
    return shortened(line)


def shortened(text: str) -> str:
    """Return a text in one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= REASON_LENGTH else f"{line[: REASON_LENGTH - 3]}..."


def _log(file: Path | None, record: Record) -> None:
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def _logged(options: argparse.Namespace, way: Way) -> dict[str, Heard]:
    """Read what families of a run that was interrupted came to."""
    if not options.resume or options.log is None or not options.log.exists():
        return {}
    records = map(json.loads, options.log.read_text().splitlines())
    return {record["family"]: record["heard"] for record in records if record.get("way", LOCKSTEP) == way.name}
