"""Whether plans are to be tried, and what tries those of a model that is made parallel."""

from __future__ import annotations

import os
from typing import Any, Literal

from hetu_fx.check.checker import Checker
from hetu_fx.errors import StateError
from hetu_fx.prepare import Preparation
from hetu_fx.switching.adapt.tried import TryPlan
from hetu_fx.switching.step.execution import Execution

VARIABLE = "HETU_FX_CHECK"


def wants_checks(asked: Literal["auto"] | bool) -> bool:
    """Tell whether plans are tried: as asked, or as the environment says where nobody has.

    Raises:
        StateError: something else was asked.
    """
    if asked not in ("auto", True, False):
        raise StateError(f"check={asked!r} is not known; use 'auto', True or False")
    return os.environ.get(VARIABLE, "1") != "0" if asked == "auto" else bool(asked)


def try_of(wanted: Preparation, execution: Execution[Any], world: int) -> TryPlan:
    """Return what tries plans of a model that is about to become parallel."""
    return Checker(
        wanted.model, wanted.loss_fn, wanted.batch, execution, world=world, shared=wanted.settings.shared
    ).try_plan
