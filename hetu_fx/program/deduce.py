"""Deduce a program under a plan: what its variants and the planner start from."""

from __future__ import annotations

from hetu_fx.plans.plan import Plan
from hetu_fx.program.program import Program
from hetu_fx.transforms.layouts.annotate import Annotate
from hetu_fx.transforms.layouts.deduce import Deduce
from hetu_fx.transforms.layouts.deduced_graph import DeducedGraph
from hetu_fx.transforms.layouts.reshard_cost import bytes_of, travelling_work
from hetu_fx.transforms.passes import run_pass


def sizes_of(program: Program) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what deduction weighs ways by: bytes of values, and work that travels; of this rank's example."""
    return bytes_of(program.graph), travelling_work(program.graph, program.factors)


def deduce_program(program: Program, plan: Plan, *, wants_values: bool, deduce: Deduce | None = None) -> DeducedGraph:
    """Put a plan on a program and deduce every value's state; without `deduce`, for typical links."""
    return run_pass(deduce or Deduce(), run_pass(Annotate(plan, wants_values), program.analysed))
