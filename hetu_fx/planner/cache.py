"""Plans that have been made, kept by content: the same question is not searched twice.

A file holds the answer to one question. Its name is a digest of all that the answer depends on: profile, cluster,
options, the plan before, the captured graph, the search, and the code of the planner itself. Files are written
atomically, and checked when they are read: one that is torn or of another question is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import hetu_fx.comm_ops
import hetu_fx.planner
from hetu_fx.base.json_values import many
from hetu_fx.base.records import Document, Key, record
from hetu_fx.errors import PlanError
from hetu_fx.planner.make_plan import make_plans
from hetu_fx.planner.search.problem import Problem
from hetu_fx.plans.plan import Plan

FORMAT = "hetu_fx.made_plans/1"

_CODE = (hetu_fx.planner, hetu_fx.comm_ops)  # what decides about plans, and prices them


def default_folder() -> Path:
    """Return where plans are kept for this user: $XDG_CACHE_HOME/hetu_fx/plans, or ~/.cache/hetu_fx/plans."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hetu_fx" / "plans"


def make_or_find_plans(problem: Problem, search: str, folder: Path) -> tuple[Plan, ...]:
    """Return what `make_plans` returns, from the folder if the same has been asked before.

    What is wrong with the folder or a file in it is told to `problem.tell` and costs time only.
    """
    key = question_key(problem, search)
    path = folder / f"{key}.json"
    if path.exists():
        try:
            return _read(path, key)
        except PlanError as problem_with_file:
            problem.tell(f"planning anew: {problem_with_file}")
    plans = make_plans(problem, search)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _Answer(key, plans).write(path)
    except OSError as failure:
        problem.tell(f"the plan is not kept for the next time: {failure}")
    return plans


def question_key(problem: Problem, search: str) -> str:
    """Return the digest of a question: equal for equal content, on every machine that runs the same code."""
    question = {
        "search": search,
        "profile": problem.profile.to_json(),
        "cluster": problem.cluster.to_json(),
        "options": asdict(problem.options),
        "before": None if problem.before is None else problem.before.to_json(),
        "captured": None if problem.captured is None else asdict(problem.captured.hap),
        "code": _code_digest(),
    }
    text = json.dumps(question, sort_keys=True, separators=(",", ":"), default=sorted)  # sets are no JSON
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _code_digest() -> str:
    """Return a digest of the version and of the sources that plans depend on."""
    digest = hashlib.sha256(metadata.version("hetu-fx").encode())
    for package in _CODE:
        folder = Path(package.__path__[0])
        for source in sorted(folder.rglob("*.py")):
            digest.update(source.relative_to(folder).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Answer(Document):
    """What a file holds."""

    key: str
    plans: tuple[Plan, ...]


_Answer.form = record(_Answer, PlanError, format=FORMAT, plans=Key(many(Plan.form.values)))


def _read(path: Path, key: str) -> tuple[Plan, ...]:
    answer = _Answer.read(path)
    if answer.key != key or not answer.plans:
        raise PlanError(f"{path} does not hold the answer to the question that its name says")
    return answer.plans
