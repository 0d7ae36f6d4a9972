"""What the command line names: a function that makes a model, and a process's device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hetu_fx.errors import HetuFxError, ProfileError


def load_function(text: str) -> Callable[[], Any]:
    """Return the function that MODULE:FUNCTION or SCRIPT.py:FUNCTION names; it makes (model, batch), or a model.

    Modules are also looked for in the current folder.
    """
    place, colon, name = text.rpartition(":")
    if not (place and colon and name):
        raise ProfileError(
            f"model {text!r} names no function\nhint: write it like MODULE:FUNCTION or SCRIPT.py:FUNCTION"
        )
    module = _script(text, Path(place)) if place.endswith(".py") else _module(text, place)
    found = getattr(module, name, None)
    if not callable(found):
        raise ProfileError(f"model {text!r}: module {place} has no function {name}\nhint: name one that it has")
    result: Callable[[], Any] = found
    return result


def _module(text: str, place: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return import_module(place)
    except ModuleNotFoundError as problem:
        raise ProfileError(
            f"model {text!r}: {problem}\nhint: start in the folder of the module, or install it"
        ) from None


def _script(text: str, file: Path) -> ModuleType:
    """Import a script by its path; what it does as `__main__` is not done."""
    if not file.is_file():
        raise ProfileError(f"model {text!r}: there is no file {file}\nhint: give the path of a script")
    sys.path.insert(0, str(file.resolve().parent))
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def local_device(name: str) -> str:
    """Return the device of this process, of a type: of several that of its local rank."""
    from hetu_fx.base.device_types import HOST, device_types

    is_type = name != HOST.type and name in {kind.name for kind in device_types()}
    return f"{name}:{os.environ.get('LOCAL_RANK', '0')}" if is_type else name


def check_folder(option: str, path: Path, error: type[HetuFxError]) -> None:
    """Raise `error` where a file cannot be written, before anything long is done for it."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise error(f"{option} {path}: there is no folder {folder}\nhint: make it, or name another place")
    if path.is_dir():
        raise error(f"{option} {path} is a folder\nhint: name a file in it")
    if not os.access(folder, os.W_OK):
        raise error(f"{option} {path}: the folder {folder} cannot be written to\nhint: name another place")
