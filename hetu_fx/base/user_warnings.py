"""Warnings at the user's line: where the script calls in, or where its forward has what is warned of."""

from __future__ import annotations

import sys
import warnings

import torch.distributed as dist

from hetu_fx.base.user_frames import user_frame


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
    here = sys._getframe(1)
    frame = user_frame(here) or here
    space = globals() if at else frame.f_globals
    file, line = at or (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(text, category, file, line, registry=space.setdefault("__warningregistry__", {}))
