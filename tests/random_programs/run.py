"""Pairs of a random program and a random plan: they are tried one after another, and the first bad ones made small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from time import monotonic

from hetu_fx.plans.plan import Plan
from tests.ops.trial import Kind, Outcome, Trial, change_by_an_ulp, raised, trains
from tests.random_programs import plans
from tests.random_programs.program import Program, draw

PLANS_PER_PROGRAM = 8
MEETS = 0.3
"""Of how many programs rows meet in a step or the loss."""
TOLERANCE = 1e-8
FEWEST_DIGITS = 1e-6
"""What an ulp may change: in 3 of 100 programs that are drawn it changes all, and nothing can be said of them."""
SHRINK_SECONDS = 60.0


@dataclass(frozen=True)
class Pair:
    """A program and a plan, and what became of them."""

    seed: str
    program: Program
    plan: Plan
    kind: Kind
    why: str

    @property
    def text(self) -> str:
        """Return the case, as it can be run again."""
        dims = ", ".join(map(str, self.program.dims))
        given = (
            f"rows of the batches: {list(self.program.rows)}, input: (rows, {dims}), rows in {self.program.row_dims}"
        )
        plan = f"plan: {json.dumps(self.plan.to_json())}"
        return "\n".join([f"{self.kind.value} (seed {self.seed}): {self.why}", self.program.source, given, plan, ""])


def pairs(seed: int, seconds: float, most: int | None = None) -> Iterator[Pair]:
    """Yield pairs, the same for the same seed, for so many seconds, or so many of them."""
    until, number, told = monotonic() + seconds, 0, 0
    while monotonic() < until and (most is None or told < most):
        for pair in of_program(seed, number):
            yield pair
            told += 1
            if monotonic() >= until:
                break
        number += 1


def of_program(seed: int, number: int) -> Iterator[Pair]:
    """Yield the pairs of one program, which may be none: not every program that is drawn trains, and has digits."""
    r = Random(f"{seed} {number}")
    program = draw(r, MEETS)
    trial = _trial(program)
    if trial is None:
        return
    for _ in range(PLANS_PER_PROGRAM):
        plan = plans.draw(r, program.blocks)
        yield Pair(f"{seed}, program {number}", program, plan, *_outcome(trial, plan))


def _trial(program: Program) -> Trial | Outcome | None:
    """Return a program ready to be tried, what its capture came to, or None if plain PyTorch makes noise of it."""
    model, batches = program.model(), program.batches()
    try:
        if not trains(model, batches) or change_by_an_ulp(model, batches) > FEWEST_DIGITS:
            return None
    except (RuntimeError, IndexError, ValueError):
        return None
    try:
        return Trial(model, batches, TOLERANCE, program.row_dims)
    except Exception as error:
        return raised(error)


def _outcome(trial: Trial | Outcome, plan: Plan) -> Outcome:
    return trial.under(plan) if isinstance(trial, Trial) else trial


def tried(seed: str, program: Program, plan: Plan) -> Pair | None:
    """Return a pair and what becomes of it; None if nothing can be said of the program."""
    trial = _trial(program)
    return None if trial is None else Pair(seed, program, plan, *_outcome(trial, plan))


def shrunk(pair: Pair, seconds: float = SHRINK_SECONDS) -> Pair:
    """Return the smallest pair found that is as bad: without steps, blocks, stages or devices that it does not need."""
    until = monotonic() + seconds
    smaller: Pair | None = pair
    while smaller is not None:
        pair = smaller
        smaller = next(
            (found for found in _smaller(pair, until) if found is not None and _is_as_bad(found, pair)), None
        )
    return pair


def _smaller(pair: Pair, until: float) -> Iterator[Pair | None]:
    """Yield pairs with less in them while there is time; None for each that is none."""
    for program in pair.program.smaller():
        if monotonic() < until:
            yield tried(pair.seed, program, pair.plan) if program.can_be else None
    if monotonic() < until and (trial := _trial(pair.program)) is not None:
        for plan in plans.smaller(pair.plan):
            if monotonic() < until:
                yield Pair(pair.seed, pair.program, plan, *_outcome(trial, plan))


def _is_as_bad(found: Pair, pair: Pair) -> bool:
    """Tell whether two pairs are bad alike: of the same kind, by the same error."""
    return found.kind is pair.kind and found.why.split(" ")[0] == pair.why.split(" ")[0]
