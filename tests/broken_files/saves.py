"""One folder that is saved again and again: read meanwhile by others, or while its writer is killed.

Every tensor of the k-th save holds k, and so does its `extra`: a load that gives several numbers has mixed saves.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from hetu_fx.checkpoint.folders import latest
from hetu_fx.errors import HetuFxError
from tests.broken_files.children import Child, in_child
from tests.broken_files.trained import trained

READERS = 2
PATIENCE = 120.0
NAME = "run[1]"
STEP = "step[a]-2"
FILE_BYTES = 150
"""So that a save has several files."""
RENAMES = 4
"""Before which a save ends without a word: two of today's, and room for another way to do it."""
LONGEST_SAVES = 3.0
"""Before a kill, in times of a save."""

BARS = ("mixed", "foreign", "nothing found", "writer broken", "lost", "left behind", "no whole load")


class Count:
    """A number that a process tells all that were forked from the one that made it."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8)

    @property
    def value(self) -> int:
        """Return it."""
        return int(struct.unpack("<q", self._shared[:8])[0])

    @value.setter
    def value(self, value: int) -> None:
        self._shared[:8] = struct.pack("<q", value)


def save(folder: Path, number: int) -> None:
    """Save what holds a number everywhere."""
    run = trained()
    run.fill(number)
    run.hetu.save(folder, optimizer=run.optimizer, extra={"number": number}, max_shard_size=FILE_BYTES)


def load(folder: Path, **options: Any) -> int:
    """Load, and return the number that all holds. Raises Mixed where it holds several."""
    run = trained()
    run.fill(-1)
    extra = run.hetu.load(folder, optimizer=run.optimizer, **options)
    return check_numbers(extra)


class Mixed(Exception):
    """What was loaded is of several saves."""


class NothingFound(Exception):
    """There is a whole save, and it is not found."""


def check_numbers(extra: Mapping[str, Any]) -> int:
    """Return the number that all tensors hold, and `extra`. Raises Mixed where there are several."""
    if (numbers := trained().numbers) != {float(extra["number"])}:
        raise Mixed(f"numbers {sorted(numbers)} with extra {extra}")
    return int(extra["number"])


def _load_latest(parent: Path) -> int:
    found = latest(parent)
    if found is None:
        raise NothingFound("latest() finds nothing")
    return load(found)


WAYS: Mapping[str, Callable[[Path], int]] = {
    "load": lambda parent: load(parent / STEP),
    "latest": _load_latest,
    "verify": lambda parent: load(parent / STEP, verify=True),
}
_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (HetuFxError, "refused"),
    (Mixed, "mixed"),
    (NothingFound, "nothing found"),
)


def outcome_of(act: Callable[[], Any]) -> tuple[str, str]:
    """Return what became of a load, and how that is told."""
    try:
        return "whole", str(act())
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        kind = next((kind for types, kind in _KINDS if isinstance(error, types)), "foreign")
        return kind, f"{type(error).__name__} at {Path(frame.filename).name}:{frame.name}: {str(error)[:160]}"


def read_while_written(seconds: float) -> tuple[Counter[str], list[str]]:
    """Save for so many seconds while others load; returns outcomes and some of what was told of each."""
    trained()
    with tempfile.TemporaryDirectory() as folder:
        parent, saves = Path(folder) / NAME, Count()
        until = time.monotonic() + seconds
        _ = in_child(lambda: save(parent / STEP, 0), seconds=PATIENCE).sound
        children = [
            Child(lambda: _write(parent, saves, until)),
            *(Child(lambda: _read(parent, until)) for _ in range(READERS)),
        ]
        writer, *readers = [child.wait(seconds + PATIENCE) for child in children]
    counts, told = Counter[str]({"saves": saves.value}), list[str]()
    if writer.error or writer.hung or writer.signal:
        counts["writer broken"] += 1
        told.append(f"writer broken after save {saves.value}: {writer.error[-600:] or writer}")
    for reader in readers:
        counts.update(reader.sound["counts"])
        told += reader.sound["told"]
    counts["no whole load"] = int(not counts["whole"])
    return counts, told


def _write(parent: Path, saves: Count, until: float) -> None:
    while time.monotonic() < until or not saves.value:
        save(parent / STEP, saves.value + 1)
        saves.value += 1


def _read(parent: Path, until: float) -> Any:
    counts, told = Counter[str](), dict[tuple[str, str], str]()
    while time.monotonic() < until or (not counts["whole"] and time.monotonic() < until + PATIENCE / 2):
        for way, read in WAYS.items():
            kind, says = outcome_of(partial(read, parent))
            counts[kind] += 1
            if kind != "whole":
                told.setdefault((kind, says.split(":")[0]), f"{kind} ({way}): {says}")
    return {"counts": counts, "told": list(told.values())}


def kill_while_saving(kills: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill what saves, first before each of its renames, then at random moments; returns outcomes, and the bad ones."""
    trained()
    r, counts, told = Random(seed), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        parent, saves = Path(folder) / NAME, Count()
        _ = in_child(lambda: save(parent.parent / "first", 0), seconds=PATIENCE).sound
        started = time.monotonic()
        _ = in_child(lambda: save(parent / STEP, 0), seconds=PATIENCE).sound
        longest = LONGEST_SAVES * (time.monotonic() - started)
        for number in range(kills):
            how = f"an end at rename {number}" if number < RENAMES else f"kill {number}"
            if number < RENAMES:
                child = Child(partial(_save_to_rename, parent, saves, number))
            else:
                child = Child(lambda: _save_on(parent, saves))
                time.sleep(r.uniform(0.0, longest))
                child.kill()
            child.wait(PATIENCE)
            for kind, says in _after(parent, saves):
                counts[kind] += 1
                if kind != "whole":
                    told.append(f"{kind} after {how}: {says}")
    counts["no whole load"] = int(not counts["whole"])
    return counts, told


def _save_on(parent: Path, saves: Count) -> None:
    while True:
        save(parent / STEP, saves.value + 1)
        saves.value += 1


def _save_to_rename(parent: Path, saves: Count, number: int) -> None:
    """Save, and end without a word before the `number`-th rename of the save."""
    left = [number]

    def ending(rename: Callable[..., None]) -> Callable[..., None]:
        def renamed(*arguments: Any, **options: Any) -> None:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            rename(*arguments, **options)

        return renamed

    os.rename, os.replace = ending(os.rename), ending(os.replace)
    save(parent / STEP, saves.value + 1)
    saves.value += 1


def _after(parent: Path, saves: Count) -> list[tuple[str, str]]:
    """Look at what a kill has left, save anew, and see whether anything of the killed one is still there."""

    def look() -> Any:
        return [_lost_or(way, *outcome_of(partial(WAYS[way], parent)), saves.value) for way in ("latest", "load")]

    def save_anew() -> Any:
        save(parent / STEP, saves.value + 1)
        saves.value += 1
        left = [path for path in parent.iterdir() if path.name != STEP]
        for path in left:
            shutil.rmtree(path)
        return [("left behind", str([path.name for path in left]))] if left else []

    seen = in_child(look, seconds=PATIENCE)
    again = in_child(save_anew, seconds=PATIENCE)
    broken = [("writer broken", again.error[-300:] or str(again))] if again.value is None else again.value
    return [*map(tuple, seen.sound), *map(tuple, broken)]


def _lost_or(way: str, kind: str, says: str, least: int) -> tuple[str, str]:
    """Return the outcome of a load after a kill: lost, where a save that was finished is not what is found."""
    if (kind == "whole" and int(says) < least) or (kind == "refused" and way == "latest"):
        return "lost", f"{says} for {least}"
    return kind, f"{way}: {says}"
