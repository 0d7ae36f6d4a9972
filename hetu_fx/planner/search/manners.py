"""How the devices of a stage share what they do not split: by tokens, throughout or between products, or not at all.

Each way of sharing costs messages or buys memory, so that few are worth asking for. A sequence is shared throughout
(context parallel) where there are fewer rows than devices, or where plans that share none recompute or do not fit; then
by as few devices as do. Keys and values go round in a ring where not even that is enough while they are gathered. A
tensor parallel group shares it between products where memory asks for it, or where the options say that it pays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetu_fx.cluster.cluster import Device
from hetu_fx.planner.search.estimates import Shape, device_ranks
from hetu_fx.planner.search.problem import Problem
from hetu_fx.planner.values.program import ProgramCosts
from hetu_fx.plans.plan import Attention, Plan, Stage


@dataclass(frozen=True, slots=True)
class SequenceMode:
    """How a plan's stages share a sequence.

    Attributes:
        context: by how many parts; each is the work of a tensor parallel group.
        attention: how keys and values come to those that need them, as `Plan.attention`.
        sequence_parallel: tensor parallel groups share it where they split nothing else.
    """

    context: int = 1
    attention: Attention = "auto"
    sequence_parallel: bool = False

    def of(self, plan: Plan) -> Plan:
        """Return a plan with what is said once for all of its stages."""
        return replace(plan, attention=self.attention, sequence_parallel=self.sequence_parallel)

    def costs(self, costs: ProgramCosts) -> ProgramCosts:
        """Return the costs of such plans."""
        if self.sequence_parallel:
            return costs.in_sequence
        return costs.attending(self.attention)

    @property
    def shape(self) -> Shape:
        """Return even stages of such plans."""
        return lambda devices: Stage(device_ranks(devices), context=self.context)


PLAIN = SequenceMode()
IN_SEQUENCE = SequenceMode(sequence_parallel=True)


def shared_between_products(problem: Problem, found: Iterable[Plan]) -> bool:
    """Tell whether plans whose groups share the sequence are worth asking for, when those that do not are `found`."""
    options, costs = problem.options, problem.costs
    if options.sequence_parallel is False or not options.tensor_parallel or not costs.has_sequence:
        return False
    return bool(options.sequence_parallel) or _is_short_of_memory(problem, found)


def shared_throughout(problem: Problem, found: Iterable[Plan]) -> bool:
    """Tell whether context parallel plans are worth asking for, when those that are not are `found`."""
    if not problem.options.context_parallel or problem.costs.sequence_units < 2:
        return False
    return problem.costs.rows < len(problem.cluster.devices) or _is_short_of_memory(problem, found)


def _is_short_of_memory(problem: Problem, found: Iterable[Plan]) -> bool:
    """Tell whether every plan recomputes; where there are none, if no other search has found one that does not."""
    recomputing = [plan.recomputes for plan in found]
    return all(recomputing) if recomputing else not problem.priced.are_roomy


def contexts(most: int, problem: Problem) -> Iterator[int]:
    """Yield the numbers of parts of a sequence to try: doubling, then the most."""
    most = min(most, problem.costs.sequence_units)
    yield from (1 << power for power in range(1, most.bit_length()) if 1 << power < most)
    if most > 1:
        yield most


def attentions(group: int, context: int, problem: Problem) -> tuple[Attention, ...]:
    """Return the ways to attend that are worth asking for where memory is ample, for parts of such groups."""
    return ("auto", "heads") if group == 1 and context <= problem.costs.head_units else ("auto",)


def group_by_speed(devices: Sequence[Device], group: int, parts: int) -> Stage:
    """Return a stage of groups of so many neighbours that share a sequence in proportion to their speeds.

    `parts` is the finest share there is: shares are whole numbers of it.
    """
    speeds = [math.fsum(d.speed for d in devices[i : i + group]) for i in range(0, len(devices), group)]
    ratios = tuple(max(1, round(parts * speed / math.fsum(speeds))) for speed in speeds)
    ranks = device_ranks(devices)
    if group == 1:
        return Stage(ranks, ratios, context=len(ranks))
    return Stage(ranks, context=len(speeds), context_ratios=ratios)
