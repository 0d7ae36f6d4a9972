"""Which frames are of the user's code: neither of torch or python's library, nor of this package."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache, lru_cache
from types import FrameType

import torch

_OURS = "hetu_fx"
_STARTERS = ("launch", "cli")  # packages of ours that run scripts, further out
_STARTERS_FOLDERS = tuple(os.path.join(folder, name) for folder in sys.modules[_OURS].__path__ for name in _STARTERS)
_LIBRARY_FOLDERS = (os.path.dirname(torch.__file__), *map(sysconfig.get_path, ("stdlib", "platstdlib")))
_ENGINE = "_engine_run_backward"  # of torch.autograd.graph: its callers wait in it for a backward


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is the user's, from this one outwards; None where none is."""
    while frame is not None and is_inner(frame.f_code.co_filename, frame.f_code.co_name):
        frame = frame.f_back
    return frame


@cache
def our_folders() -> tuple[str, ...]:
    """Return where this package's code lies: its packages may lie beside each other."""
    own = [name for name in list(sys.modules) if name.split(".")[0] == _OURS and name.count(".") < 2]
    return tuple(folder for name in own for folder in getattr(sys.modules[name], "__path__", ()))


@lru_cache(maxsize=4096)  # every step looks at the functions on its stack
def is_inner(file: str, function: str) -> bool:
    """Tell whether a function of a file is of a library below the user's code, or of ours."""
    outside = not is_ours(file, function) and not file.startswith("<frozen")
    return not outside or _is_below(file, _STARTERS_FOLDERS) or _is_below(file, _LIBRARY_FOLDERS)


def is_ours(file: str, function: str) -> bool:
    """Tell whether it is of this package, or one of torch's in which its callers wait."""
    is_below = _is_below(file, our_folders()) and not _is_below(file, _STARTERS_FOLDERS)
    return is_below or function == _ENGINE


def _is_below(file: str, folders: tuple[str, ...]) -> bool:
    installed = "site-packages" if "dist-packages" not in file else "dist-packages"
    return any(
        file.startswith(folder + os.sep) and (installed in folder or installed not in file[len(folder) :])
        for folder in folders
    )
