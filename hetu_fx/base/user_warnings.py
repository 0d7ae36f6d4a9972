"""Warnings at the user's line: where the script calls in, or where its forward has what is warned of."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

import torch.distributed as dist

_HIDDEN = ("hetu_fx", "torch", "contextlib", "functools", "threading", "concurrent")
"""Packages whose frames are none of the user's."""


def warn_user(
    text: str,
    category: type[Warning] = UserWarning,
    at: tuple[str, int] | None = None,
    *,
    same_on_all_ranks: bool = False,
) -> None:
    """Warn of something, by default once for each place.

    Args:
        text: what to tell.
        category: of the warning.
        at: file and line that it is about; None: those from which the script has called, told by the running frames.
        same_on_all_ranks: every rank would tell the same, so that rank 0 does.
    """
    if same_on_all_ranks and dist.is_initialized() and dist.get_rank() > 0:
        return
    frame = _user_frame()
    space = globals() if at else frame.f_globals
    file, line = at or (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(text, category, file, line, registry=space.setdefault("__warningregistry__", {}))


def _user_frame() -> FrameType:
    """Return the innermost frame that is the user's; the outermost one where none is."""
    frame = sys._getframe(2)
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _HIDDEN and frame.f_back is not None:
        frame = frame.f_back
    return frame
