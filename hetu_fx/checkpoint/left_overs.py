"""What a replacement of a folder has beside it while it is under way, and leaves there where a crash ends it.

A reader never writes: what lies under another name is read there; the next writer puts it back.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hetu_fx.checkpoint.open_folder import OpenFolder
from hetu_fx.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A folder that is to be, or was, called `name`."""

    path: Path
    name: str
    is_new: bool


_LEFT_OVER = re.compile(r"\.(.+)\.(new|old)-[0-9a-f]{8}", re.DOTALL)


def left_over_name(name: str, token: str, *, is_new: bool) -> str:
    """Return the name of a folder that is to be, or was, called `name`."""
    return f".{name}.{'new' if is_new else 'old'}-{token}"


def entries(parent: Path) -> dict[str, int]:
    """Return the inodes of what a folder holds, by name: others once it is replaced. Raises CheckpointError."""
    try:
        with os.scandir(parent) as found:
            return {entry.name: entry.inode() for entry in found}
    except OSError as error:
        raise CheckpointError(f"cannot read {parent}: {error.strerror}") from error


def left_overs(parent: Path) -> list[LeftOver]:
    """Return what lies in a folder under the names of replacements, new ones first. Raises CheckpointError."""
    found = [(name, match) for name in entries(parent) if (match := _LEFT_OVER.fullmatch(name))]
    those = [LeftOver(parent / name, match[1], match[2] == "new") for name, match in found]
    return sorted(those, key=lambda one: (not one.is_new, one.path))


def is_complete(folder: Path) -> bool:
    """Tell whether a folder has a manifest and all its files have their sizes."""
    try:
        with OpenFolder(folder) as opened:
            opened.check_sizes()
    except CheckpointError:
        return False
    return True


def place_of(folder: Path) -> Path:
    """Return where a folder lies: under its name, or, where a crash left none of this name, under another."""
    if not os.path.lexists(folder) and folder.absolute().parent.is_dir():
        for left in left_overs(folder.absolute().parent):
            if left.name == folder.absolute().name and is_complete(left.path):
                return left.path
    return folder
