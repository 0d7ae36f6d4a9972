"""One trial: a good set is copied, a fault is inflicted on it, it is read in a process of its own, and judged."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import hetu_fx
from hetu_fx.errors import HetuFxError
from tests.broken_files.children import Ended, in_child
from tests.broken_files.document_faults import DOCUMENT_FAULTS
from tests.broken_files.document_kinds import DOCUMENT_KINDS
from tests.broken_files.faults import FILE_FAULTS, Fault, Place
from tests.broken_files.kind import Kind, Promise
from tests.broken_files.saved_kinds import SAVED_KINDS
from tests.broken_files.tensor_faults import TENSOR_FAULTS

KINDS: Mapping[str, Kind] = {**SAVED_KINDS, **DOCUMENT_KINDS}
FAULTS: Mapping[str, Fault] = {**FILE_FAULTS, **DOCUMENT_FAULTS, **TENSOR_FAULTS}

SECONDS = 10.0
MOST_BYTES = 256 << 20
"""That a reader of a set of some kilobytes may take."""

HARM = ("wrong values", "changed after an error", "set changed", "refused", "hang", "memory", "ended", "foreign error")
"""What can be found, the most harmful first."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with how a broken set was read."""

    what: str
    place: str
    says: str


@dataclass(frozen=True)
class Trial:
    """A fault of a kind of files, and what became of it."""

    kind: str
    fault: str
    seed: int
    where: str
    outcome: str
    finding: Finding | None = None

    @property
    def again(self) -> str:
        """Return the words by which it is run again."""
        return f"--only '{self.kind}/{self.fault}' --faults 1 --seed {self.seed}"


@dataclass(frozen=True)
class GoodSet:
    """A set that is whole.

    Attributes:
        folder: of the set.
        others: by path in the folder, what stands there in a set of other values.
        truths: what a reader gives of it; the first where nothing is lost.
        foreign: what it gives of the set of other values.
    """

    folder: Path
    others: Mapping[str, Path]
    truths: tuple[Any, ...]
    foreign: Any


class Sets:
    """Good sets of all kinds, made when they are asked for."""

    def __init__(self, folder: Path, kinds: Mapping[str, Kind] = KINDS) -> None:
        self.folder, self.kinds = folder, kinds
        self._made: dict[str, GoodSet] = {}
        self._written: dict[Any, tuple[Path, Path]] = {}

    def of(self, kind: str) -> GoodSet:
        """Return the good set of a kind."""
        if kind not in self._made:
            self._made[kind] = self._make(self.kinds[kind])
        return self._made[kind]

    def _make(self, kind: Kind) -> GoodSet:
        kind.state()  # made here, once for all children
        if kind.write not in self._written:
            self._written[kind.write] = self._write(kind, self.folder / f"sets {len(self._written)}")
        sets = self._written[kind.write]
        truths = [_value_of(kind, one) for one in sets]
        untouched = None if kind.state() is None else json.dumps(kind.state())
        texts = [json.dumps(truth) for truth in truths]
        assert texts[0] != texts[1], "both sets hold the same"
        assert untouched is None or all(untouched not in text for text in texts), "what is read changes nothing"
        return GoodSet(sets[0], dict(_others(*sets)), (truths[0], *self._instead(kind, sets[0])), truths[1])

    def _write(self, kind: Kind, folder: Path) -> tuple[Path, Path]:
        """Write both sets of a kind in one process: what captures a model does so once."""
        sets = folder / "0" / "set", folder / "1" / "set"

        def write() -> None:
            for number, one in enumerate(sets):
                one.mkdir(parents=True)
                kind.write(one, number)

        _ = in_child(write, seconds=300.0).sound
        return sets

    def _instead(self, kind: Kind, good: Path) -> Iterator[Any]:
        with tempfile.TemporaryDirectory(dir=self.folder) as aside:
            copied = Path(aside) / "set"
            shutil.copytree(good, copied, symlinks=True)
            for pattern in kind.instead:
                found = list(copied.glob(pattern))
                assert found, f"{pattern} is nowhere"
                for path in found:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                yield _value_of(kind, copied)


def _value_of(kind: Kind, folder: Path) -> Any:
    """Read a good set."""
    told = in_child(lambda: _read(kind, folder), seconds=120.0).sound
    assert "value" in told, f"a good set cannot be read: {told}"
    return told["value"]


def _others(one: Path, other: Path) -> Iterator[tuple[str, Path]]:
    """Pair the files of two sets: by name, and where names hold what differs, by their order."""
    by_form = [
        sorted((len(p.parts), p.suffix, str(p)) for p in root.rglob("*") if p.is_file()) for root in (one, other)
    ]
    if len(by_form[0]) == len(by_form[1]):
        for a, b in zip(*by_form, strict=True):
            yield str(Path(a[-1]).relative_to(one)), Path(b[-1])


def _read(kind: Kind, folder: Path) -> Any:
    """Read a set; return its value or the error, and whether anything was changed where there is an error."""
    before = kind.state()
    try:
        return {"value": kind.read(folder)}
    except BaseException as error:
        told = {
            "ours": isinstance(error, HetuFxError),
            "error": type(error).__name__,
            "place": _place(error),
            "says": str(error)[:400].encode("utf-8", "backslashreplace").decode(),
        }
    return {**told, "changed": before != kind.state()}


PACKAGES = tuple(str(Path(path).resolve()) for path in hetu_fx.__path__)


def _place(error: BaseException) -> str:
    """Return the innermost function of the product that an error has come through."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if os.path.realpath(frame.filename).startswith(PACKAGES)]
    frame = inside[-1] if inside else frames[-1]
    return f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.name}"


def places(good: GoodSet, root: Path) -> list[Place]:
    """Return all places of a set that is about to be broken."""
    found = sorted(root.rglob("*"))
    return [Place(path, good.others.get(str(path.relative_to(root))), root) for path in found]


def pairs(sets: Sets, only: str = "") -> list[tuple[str, str]]:
    """Return kinds and faults that can happen to them; only those that are named as KIND, /FAULT or KIND/FAULT."""
    kind, _, fault = only.partition("/")
    for name, known in ((kind, sets.kinds), (fault, FAULTS)):
        if name and name not in known:
            raise SystemExit(f"{name!r} is not known; known are {', '.join(known)}")
    fitting = []
    for name in sets.kinds if not kind else (kind,):
        good = sets.of(name)
        there = places(good, good.folder)
        faults = {fault: FAULTS[fault]} if fault else FAULTS
        fitting += [(name, one) for one, what in faults.items() if any(what.fits(place) for place in there)]
    return fitting


def trial(sets: Sets, kind: str, fault: str, seed: int, *, seconds: float = SECONDS) -> Trial:
    """Break a copy of a set, read it and judge; the same seed breaks it alike."""
    good, r = sets.of(kind), Random(f"{seed} {kind} {fault}")
    with tempfile.TemporaryDirectory(dir=sets.folder) as aside:
        root = Path(aside) / "set"
        shutil.copytree(good.folder, root, symlinks=True)
        place = r.choice([place for place in places(good, root) if FAULTS[fault].fits(place)])
        did = FAULTS[fault].inflict(place, r)
        if (seal := sets.kinds[kind].seal) is not None:
            _seal(seal, root)
        where = f"{place.path.relative_to(root)}" + f": {did}" * bool(did)
        before = _listing(root)
        ended = in_child(lambda: _read(sets.kinds[kind], root), seconds=seconds)
        written = _changed(before, _listing(root), sets.kinds[kind].writes, FAULTS[fault].keeps)
        outcome, finding = judge(sets.kinds[kind], FAULTS[fault], good, ended)
    if written and (finding is None or HARM.index(finding.what) > HARM.index("set changed")):
        finding = Finding("set changed", "", f"{[os.path.relpath(name, root) for name in written][:4]}")
    return Trial(kind, fault, seed, where, outcome, finding)


def _seal(seal: Callable[[Path], None], root: Path) -> None:
    """Make sums right; where the fault is in the document that has them, they stay as they are."""
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        seal(root)


Listing = Mapping[str, tuple[int, ...]]


def _listing(root: Path) -> Listing:
    """Return what stands in a folder, without reading it."""
    told = {}
    for path in [root, *root.rglob("*")]:
        found = path.lstat()
        told[str(path)] = (found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns)
    return told


def _changed(before: Listing, after: Listing, writes: bool, keeps: bool) -> list[str]:
    """Return what a reader has changed; of one that writes, what was whole and is gone."""
    if writes:
        return sorted(before.keys() - after.keys()) if keeps else []
    return sorted({name for name, _ in before.items() ^ after.items()})


def judge(kind: Kind, fault: Fault, good: GoodSet, ended: Ended) -> tuple[str, Finding | None]:
    """Tell what became of a set that was read, and what is wrong with that."""
    told = ended.value
    if ended.hung:
        return "hang", Finding("hang", "", "still at work when its time was over")
    if told is None:
        return "ended", Finding("ended", "", f"the process was ended by signal {ended.signal}")
    if "value" in told:
        return _judge_value(kind, fault, good, told["value"], ended)
    said = f"{told['error']}: {told['says']}"
    if told["changed"]:
        return "error", Finding("changed after an error", told["place"], said)
    if not told["ours"]:
        return "error", Finding("foreign error", told["place"], said)
    if fault.keeps:
        return "refused", Finding("refused", told["place"], said)
    return "refused", _of_memory(ended)


def _judge_value(kind: Kind, fault: Fault, good: GoodSet, value: Any, ended: Ended) -> tuple[str, Finding | None]:
    if value in good.truths[: 1 if fault.keeps else None]:
        return "true values", _of_memory(ended)
    if fault.keeps:
        return "wrong", Finding("refused", "", "nothing is lost, and something else is read")
    if kind.promise is Promise.TRUE_VALUES and value != good.foreign:
        return "wrong", Finding("wrong values", "", _difference(good.truths[0], value))
    if kind.promise is Promise.FINITE:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            return "wrong", Finding("wrong values", "", "a number is not finite")
    return "other values", _of_memory(ended)


def _of_memory(ended: Ended) -> Finding | None:
    return Finding("memory", "", f"{ended.peak_bytes >> 20} MiB") if ended.peak_bytes > MOST_BYTES else None


def _difference(right: Any, found: Any, where: str = "") -> str:
    """Return the first place at which two values differ."""
    if isinstance(right, dict) and isinstance(found, dict) and right.keys() == found.keys():
        return next(_difference(right[k], found[k], f"{where}.{k}") for k in right if right[k] != found[k])
    if isinstance(right, list) and isinstance(found, list) and len(right) == len(found):
        pairs = enumerate(zip(right, found, strict=True))
        return next(_difference(a, b, f"{where}.{k}") for k, (a, b) in pairs if a != b)
    return f"{where}: {str(found)[:120]} for {str(right)[:120]}"
