"""The variants of a model by name: which there are, which of them may run, and which one runs a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hetu_fx.comm_ops.wire.groups import GroupTable
from hetu_fx.errors import BatchError, StateError
from hetu_fx.plans.plan import Plan
from hetu_fx.switching.bridge.compute import compute_layout
from hetu_fx.switching.step.execution import Execution
from hetu_fx.switching.step.policy import BatchFacts, Health, Policy, choose
from hetu_fx.switching.step.variant import Variant


class Variants(Mapping[str, Variant]):
    """The variants by name, the same on every rank.

    Attributes:
        pinned: the one that runs whatever the policy says, if any.
        drained: devices that no variant may use now.
        policy: chooses among those that may run.
        health: the devices' rates, which the policy goes by.
    """

    def __init__(self, execution: Execution[Any], table: GroupTable, homes: Mapping[str, nn.Parameter]) -> None:
        self._execution, self._table, self._homes = execution, table, homes
        self._by_name: dict[str, Variant] = {}
        self.pinned: str | None = None
        self.drained: frozenset[int] = frozenset()
        self.policy: Policy = choose
        self.health = Health()

    def __getitem__(self, name: str) -> Variant:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def known(self, name: str) -> Variant:
        """Return a variant. Raises StateError if there is none of the name."""
        if name not in self:
            raise StateError(f"there is no variant {name!r}\nhint: use one of {sorted(self)}")
        return self[name]

    def add(
        self, plan: Plan, name: str, planned_rates: Mapping[int, float] | None = None, deduced: bytes | None = None
    ) -> Variant:
        """Add a variant; its graphs are those of one of the same compute layout, or made when a batch needs them.

        `deduced` is what `deduced` has returned for the plan.
        """
        self.check(plan, name)
        layout = compute_layout(plan)
        compute = next((v.compute for v in self.values() if compute_layout(v.plan) == layout), None)
        compute = compute or self._execution.compute(plan, self._table, self._homes, deduced)
        made: Variant = self._execution.variant(name, plan, compute, dict(planned_rates or {}))
        self._by_name[name] = made
        return made

    def check(self, plan: Plan, name: str) -> None:
        """Raise HetuFxError unless a variant of the name and the plan may be added."""
        if name in self:
            raise StateError(f"there is a variant {name!r} already\nhint: choose another name")
        if name in ("", ".", "..") or not set("/\\\0").isdisjoint(name):
            raise StateError(
                f"a variant cannot be named {name!r}: exports have a folder of its name\nhint: use letters"
            )
        self._execution.check(plan, self._table.size)

    def take_in_homes(self, *, are_others: bool) -> None:
        """Look at the homes anew: some are trained or no longer, or (`are_others`) there are other ones."""
        for variant in self.values():
            variant.compute.rehome()
            if are_others:
                variant.compute.drop()
            variant.look_at_homes()

    def layouts(self) -> frozenset[Plan]:
        """Return the compute layouts of the variants there are."""
        return frozenset(compute_layout(variant.plan) for variant in self.values())

    def deduced(self, plan: Plan, layouts: Collection[Plan]) -> bytes | None:
        """Return what a variant of the plan has to find out before it runs; None where there is nothing to find out.

        Nor is there for a plan of one of the compute `layouts` that are given.
        """
        return None if compute_layout(plan) in layouts else self._execution.deduced(plan, self._table.topology)

    @property
    def usable(self) -> dict[str, Variant]:
        """Return the variants that use no drained device, by name."""
        return {name: one for name, one in self._by_name.items() if self.drained.isdisjoint(one.facts.devices)}

    def able(self) -> list[Variant]:
        """Return the variants that may run sequences."""
        return list(self.usable.values()) if self.pinned is None else [self.known(self.pinned)]

    def pin(self, name: str | None) -> None:
        """Run one variant from the next step on (None: let the policy choose again)."""
        if name is not None and not self.drained.isdisjoint(self.known(name).plan.devices):
            raise StateError(
                f"variant {name!r} uses devices {sorted(self.drained.intersection(self[name].plan.devices))}, "
                f"which are drained\nhint: use another variant, or model.hetu.admit them"
            )
        self.pinned = name

    def set_policy(self, policy: Policy) -> None:
        """Let another policy choose from the next step on."""
        self.policy = policy

    def set_rates(self, rates: Mapping[int, float]) -> None:
        """Let the policy go by these straggling rates from the next step on."""
        self.health = Health(rates)

    @contextmanager
    def draining(self, devices: frozenset[int]) -> Iterator[None]:
        """Let exactly these devices be drained, and stay so unless what is done inside fails."""
        before, self.drained = self.drained, devices
        try:
            yield
        except Exception:
            self.drained = before
            raise

    def chosen(self, batch: BatchFacts) -> str:
        """Return the name of the variant that runs a batch: the pinned one, or the one that the policy chooses.

        Raises:
            StateError, BatchError: that must exist, use no drained device, and take the batch.
        """
        if self.pinned is not None:
            return self.known(self.pinned).name
        facts = {name: variant.facts for name, variant in self.usable.items()}
        if not facts:
            raise StateError(
                f"every variant uses one of the drained devices {sorted(self.drained)}\nhint: add one that does not by "
                f"model.hetu.add_variant(plan), or model.hetu.admit them"
            )
        name = self.policy(tuple(facts.values()), batch, self.health)
        self.known(name)
        if name not in facts:
            raise StateError(
                f"the policy chose variant {name!r}, but its devices are drained\nhint: see model.hetu.drained"
            )
        if not facts[name].fits(batch):
            raise BatchError(
                f"the policy chose variant {name!r} for a batch whose longest sequence is {batch.longest}, but that "
                f"takes {facts[name].max_length} at most\nhint: let it choose among those that fit"
            )
        return name
