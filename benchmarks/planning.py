"""Seconds that planning takes, and how good its plans are, for 8 to 4,096 devices.

`auto` is asked about the clusters of `cases.planning`: the 14 published ones of H20 and H800 (Hetu v2), Malleus'
situations, and clusters of one, two and four kinds. Its plan is compared with the best homogeneous plan, with the
published plan where there is one, and, for three devices, with the best of all plans; all are simulated by the same
cost model. Seconds are those of the processor, which depend less on what else runs. Questions of up to
`TWICE_SECONDS` are asked twice. A question that takes longer than `PATIENCE_SECONDS` is given up, and counts as one
without an answer.

Besides, closed form and simulation are held against each other on drawn plans (`cases.fidelity`), and auto's choice is
against other plans by simulation, for one, two and four kinds of devices and links of 10, 100 and 400 Gbit/s
(`cases.regret`).
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import TypeVar

from benchmarks.cases.exhaustive_plans import all_plans
from benchmarks.cases.fidelity import Fidelity, fidelity, share_over
from benchmarks.cases.planning import Case, cases, hard_cases, llama
from benchmarks.cases.regret import Question, questions, regret
from benchmarks.kit.report import Bar, Row, finish, parser, table
from benchmarks.kit.smallest import few, least
from hetu_fx.cluster.cluster import Cluster, Link
from hetu_fx.planner.make_plan import make_plan, make_plans
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.searches import find_search
from hetu_fx.planner.simulate.simulate import simulated_seconds
from hetu_fx.planner.values.options import PlanOptions
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Plan

QUICK_DEVICES = 8
PATIENCE_SECONDS = 60.0
TWICE_SECONDS = 3.0
NARROW_BAR = 5.0  # seconds for 8 devices and a decoder of GPT-2's width
SEARCH_BARS = {
    ("malleus", "7B, 64 A800, 3 straggle"): 2.0,
    ("malleus", "7B, 1024 A800, 3 straggle"): 60.0,
    ("malleus", "7B, 4096 A800, 1 straggles"): 60.0,
    ("heteroauto", "7B, 64 of 4 kinds"): 2.0,
    ("heteroauto", "70B, 256 of 4 kinds"): 60.0,
    ("auto", "7B, 64 of 1 kinds"): 2.0,
    ("auto", "7B, 64 of 2 kinds"): 2.0,
    ("auto", "7B, 64 of 4 kinds"): 2.0,
    ("auto", "7B, 4096 A800, 1 straggles"): 60.0,
    ("auto", "70B, 256 of 4 kinds"): 60.0,
}
"""Seconds of a search alone, and of all that are asked where none is named, without simulations of what they find."""


NUM_PLANS, QUICK_PLANS = 2000, 200  # drawn, for the fidelity of closed form and simulation
FURTHEST = 10  # of them that are shown
MOST_DEVICES = 256  # of the questions for which auto's choice is compared with others by simulation
COMPARED = 200  # best-priced plans, and as many drawn ones
HOMOGENEOUS = 40  # equal pipelines that are simulated, the best by price
REGRET_BAR = 1.02

T = TypeVar("T")

Found = tuple[list[Bar], list[Row]]
"""What a part has found."""


class OutOfPatienceError(Exception):
    """A question took too long."""


def main() -> int:
    """Measure and judge."""
    made = parser("planning", "Seconds and quality of plans for 8 to 4,096 devices.")
    made.add_argument("--part", choices=[*PARTS], action="append", help="one of what is measured (default: all)")
    made.add_argument(
        "--devices", type=int, nargs="+", help="of regret: questions about so many devices (default: all)"
    )
    made.add_argument("--kinds", type=int, nargs="+", help="of regret: questions about so many kinds (default: all)")
    made.add_argument("--gbits", type=int, nargs="+", help="of regret: questions about links of so many Gbit/s")
    options = made.parse_args()
    asked = partial(regret_part, devices=options.devices, kinds=options.kinds, gbits=options.gbits)
    parts = {**PARTS, "regret": asked}
    found = [parts[name](options.quick) for name in options.part or parts]
    bars, rows = ([one for part in found for one in part[side]] for side in (0, 1))
    return finish("planning", bars, rows)


def plans_part(quick: bool) -> Found:
    """Ask `auto` about all cases."""
    rows = [_told(measure(case)) for case in few(cases(QUICK_DEVICES if quick else 4096), 2)]
    answered = [row for row in rows if "step" in row]
    narrow = [_number(row, "plan seconds") for row in rows if str(row["case"]).startswith("width 768")]
    worst = max(_number(row, "over homogeneous") for row in answered if "over homogeneous" in row)
    bars = [
        Bar("questions without an answer", len(rows) - len(answered), 0, False),
        Bar("slowest plan over the best homogeneous one", worst, 1.01, False),
        Bar("questions with two answers", sum(row.get("same") == "no" for row in rows), 0, False),
        Bar("slowest plan over the best of all, 3 devices", max(over_the_best_of_all()), 1.02, False),
        Bar("seconds for 8 devices and width 768 (slowest)", max(narrow), NARROW_BAR, False),
    ]
    return bars, rows


def searches_part(quick: bool) -> Found:
    """Time searches alone."""
    most = QUICK_DEVICES if quick else 4096
    by_name = {case.name: case for case in (*cases(most), *hard_cases(most))}
    asked = few(pair for pair in SEARCH_BARS if pair[1] in by_name)
    seconds = {pair: seconds_of(pair[0], by_name[pair[1]]) for pair in asked}
    bars = [Bar(f"seconds of {' '.join(pair)}", took, SEARCH_BARS[pair], False) for pair, took in seconds.items()]
    return bars, [{"case": pair[1], "search": pair[0], "seconds": took} for pair, took in seconds.items()]


def fidelity_part(quick: bool) -> Found:
    """Hold closed form and simulation of drawn plans against each other; rows are of those that differ most."""
    found = list(fidelity(least(QUICK_PLANS if quick else NUM_PLANS, 10)))
    furthest = sorted(found, key=lambda one: (-one.unexplained, -abs(one.difference)))[:FURTHEST]
    return fidelity_bars(found), list(map(asdict, furthest))


def regret_part(
    quick: bool,
    devices: Sequence[int] | None = None,
    kinds: Sequence[int] | None = None,
    gbits: Sequence[int] | None = None,
) -> Found:
    """Hold auto's choice against many others by simulation, for so many devices, kinds and links, or all there are."""
    found = questions(QUICK_DEVICES if quick else MOST_DEVICES)
    asked = [
        told_regret(one)
        for one in few(found)
        if (not devices or one.devices in devices)
        and (not kinds or len(one.kinds) in kinds)
        and (not gbits or one.gbits in gbits)
    ]
    worst = max(_number(row, "auto over the best") for row in asked)
    return [Bar("auto's plan over the best of many, simulated (slowest)", worst, REGRET_BAR, False)], asked


PARTS: Mapping[str, Callable[[bool], Found]] = {
    "plans": plans_part,
    "searches": searches_part,
    "fidelity": fidelity_part,
    "regret": regret_part,
}
"""What can be measured apart; each is asked whether it is to be quick."""


def fidelity_bars(found: Sequence[Fidelity]) -> list[Bar]:
    """Return how near closed form and simulation are, and whether folds change anything."""
    plain = [abs(one.difference) for one in found if one.is_plain]
    return [
        Bar("closed form's largest difference where nothing overlaps or shares", max(plain), 0.005, False),
        Bar(
            "share of drawn plans that differ by over 3 % for other reasons",
            share_over([one.unexplained for one in found]),
            0.0,
            False,
        ),
        Bar(
            "largest difference made by simulating alike pipelines as one",
            max(f.folded for f in found),
            0.005,
            False,
        ),
    ]


def told_regret(question: Question) -> Row:
    """Return auto's simulated step over the best of the other plans, and say so."""
    over, count = regret(question, COMPARED)
    return _told({"case": question.name, "auto over the best": over, "of plans": count})


def _told(row: Row) -> Row:
    print(table([row]), file=sys.stderr, flush=True)
    return row


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Raise `OutOfPatienceError` where what is done inside takes more of the processor."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise OutOfPatienceError

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def timed(ask: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> tuple[float, T | None]:
    """Return the seconds that a question takes, and its answer; None where it takes too long."""
    start = time.process_time()
    try:
        with patience(seconds):
            answer = ask()
    except OutOfPatienceError:
        return time.process_time() - start, None
    return time.process_time() - start, answer


def measure(case: Case) -> Row:
    """Plan, and price what it is compared with."""
    problem = Problem(case.profile, case.cluster)
    seconds, plans = timed(lambda: make_plans(problem))
    row: dict[str, object] = {"case": case.name, "plan seconds": seconds}
    if plans is None:
        return row
    (plan,) = plans
    row |= {"step": _step(plan), **_compared(case, problem, _step(plan))}
    if seconds <= TWICE_SECONDS:
        row["same"] = "yes" if make_plans(problem) == plans else "no"
    return row | {
        "pipelines": len(plan.pipelines),
        "stages": max(len(pipeline.stages) for pipeline in plan.pipelines),
        "recompute": sum(stage.recompute for *_, stage in plan.stages),
    }


def _compared(case: Case, problem: Problem, step: float) -> Row:
    """Return the simulated seconds of the best homogeneous plan and of the published one."""
    found: dict[str, object] = {}
    _, even = timed(lambda: min(_homogeneous(problem), default=None))
    if even is not None:
        found = {"homogeneous": even, "over homogeneous": step / even}
    published = case.published_plan
    return found | ({"published": simulated_seconds(published, problem.costs, problem.cluster)} if published else {})


def _homogeneous(problem: Problem) -> Iterator[float]:
    """Yield the simulated seconds of the best equal pipelines by price."""
    prices = find_search("homogeneous").find(problem)
    for plan in sorted(prices, key=prices.__getitem__)[:HOMOGENEOUS]:
        yield simulated_seconds(plan, problem.costs, problem.cluster)


def seconds_of(search: str, case: Case) -> float:
    """Return the processor's seconds of one search, up to its bar and a little more."""
    most = 1.5 * SEARCH_BARS[search, case.name]
    return timed(lambda: find_search(search).find(Problem(case.profile, case.cluster)), most)[0]


def over_the_best_of_all() -> Iterator[float]:
    """Yield how much slower plans for three devices are than the best of all plans."""
    counts = (1, 4)
    whole = llama(3, 1024, 2816, rows=5, units=2).costs
    costs = ProgramCosts(5, whole.before, whole.blocks, whole.after, whole.boundary_bytes, units=2)
    for speeds in ((4.0, 1.0), (3.0, 2.0, 2.0), (4.0, 2.0, 1.0)):
        cluster = Cluster.on_paper([1e12 * speed for speed in speeds], intra=Link(1e10, 1e-6))
        best = min(simulated_seconds(plan, costs, cluster) for plan in all_plans(costs, cluster, counts))
        found = make_plan(costs, cluster, options=PlanOptions(micro_batches=counts))
        yield _step(found) / best


def _step(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.seconds


def _number(row: Row, key: str) -> float:
    return float(str(row[key]))


if __name__ == "__main__":
    sys.exit(main())
