"""The registry of op rules: the table of the rule files, and what users add with `register_rule`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from hetu_fx.deduction.rules import embedding, pointwise, products, reduction, routing, view
from hetu_fx.deduction.rules.build import Linear, from_line, title
from hetu_fx.deduction.rules.pointwise import TAG_RULE
from hetu_fx.deduction.rules.rule import Builder, Rule

RULES: Mapping[str, Rule] = {
    rule.op: rule for family in (pointwise, products, routing, reduction, view, embedding) for rule in family.RULES
}


class _UserRules:
    """The rules that users have added, by op, and what each op that was asked for has, of these or ours."""

    def __init__(self) -> None:
        self.registered: dict[str, Rule] = {}
        self.found: dict[str, Rule | None] = {}


_rules = _UserRules()


def register_rule(op: str | Any, rule: str | Builder, *, linear: Linear = "none") -> Rule:
    """Register how an op's dims relate, over any rule there is for it; return the record.

    Args:
        op: the op, e.g. `torch.ops.mylib.myop.default`, or its name "mylib.myop.default" (`*` allowed).
        rule: a rule line such as "... k, o k -> ... o" (see `hetu_fx.deduction.rules.build`), or a function from
            `Call` to `Factoring`.
        linear: for a line: in which operands the op is linear: "none", "each" (one at a time), "all"
            (jointly), or sets of operand positions.

    Raises:
        RuleError: the line or the op's name is malformed.
    """
    name = op if isinstance(op, str) else str(op)
    record = from_line(name, rule, linear) if isinstance(rule, str) else Rule(name, rule, title(rule))
    record = replace(record, traits=RULES[name].traits) if name in RULES else record
    _rules.registered[name] = record
    _rules.found.clear()
    return record


def unregister_rule(op: str | Any) -> None:
    """Drop what `register_rule` registered for an op; KeyError if there is nothing."""
    del _rules.registered[op if isinstance(op, str) else str(op)]
    _rules.found.clear()


def registered_rules() -> tuple[str, ...]:
    """Return what tells the rules that users have added from others: the op, and the line, or the function's code."""
    codes = (getattr(rule.build, "__code__", None) for rule in _rules.registered.values())
    pairs = zip(_rules.registered.items(), codes, strict=True)
    return tuple(sorted(f"{name} {rule.text} {code and code.co_code.hex()}" for (name, rule), code in pairs))


def find_rule(target: Any) -> Rule | None:
    """Return the rule of an op, or None if nothing is known of it."""
    name = str(target)
    if name not in _rules.found:
        _rules.found[name] = _look_up(name, target)
    return _rules.found[name]


def _look_up(name: str, target: Any) -> Rule | None:
    for table in (_rules.registered, RULES):
        if name in table:
            return table[name]
        for pattern, record in table.items():
            if "*" in pattern and fnmatchcase(name, pattern):
                return record
    tags = getattr(target, "tags", ())
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return TAG_RULE if is_pointwise else None
