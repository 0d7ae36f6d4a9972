"""Figures that matplotlib draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetu_fx.errors import EnvironmentProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches.

    Raises:
        EnvironmentProblem: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: its global state and window system are not wanted
    except ImportError as problem:
        raise EnvironmentProblem(
            "a picture needs matplotlib, which is not installed; pip install 'hetu-fx[ui]'"
        ) from problem
    return Figure(figsize=(width, height), layout="constrained")
