"""What can happen to files: the table of faults. Each is inflicted on one path of a good set, alike for the same seed.

Documents (JSON, lines of JSON, what stands as JSON in the header of tensors) and headers have faults of their own, in
`document_faults.py` and `tensor_faults.py`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

PAGE = 512
"""Bytes that are lost at once: less than the 4096 of a disk, as good sets are small."""
SPARSE_BYTES = 1 << 33


@dataclass(frozen=True)
class Place:
    """Where a fault is inflicted.

    Attributes:
        path: in the set that is broken.
        other: what stands at the same place in a set of other values; None where there is nothing.
        root: the folder of the whole set.
    """

    path: Path
    other: Path | None
    root: Path


@dataclass(frozen=True)
class Fault:
    """One thing that can happen.

    Attributes:
        fits: tells whether it can happen to what is at a place.
        inflict: does it, and says what it did.
        keeps: nothing is lost by it: a reader must give the true values.
    """

    fits: Callable[[Place], bool]
    inflict: Callable[[Place, Random], str]
    keeps: bool = False


def _is_file(place: Place) -> bool:
    return place.path.is_file()


def _is_filled(place: Place) -> bool:
    return place.path.is_file() and place.path.stat().st_size > 0


def _anything(place: Place) -> bool:
    return True


def _has_other(place: Place) -> bool:
    other = place.other
    return place.path.is_file() and other is not None and other.read_bytes() != place.path.read_bytes()


def _flip(place: Place, r: Random) -> str:
    data = bytearray(place.path.read_bytes())
    bit = r.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    place.path.write_bytes(data)
    return f"bit {bit} of {8 * len(data)}"


def _truncate(place: Place, r: Random) -> str:
    size = place.path.stat().st_size
    os.truncate(place.path, kept := r.randrange(1, size) if size > 1 else 0)
    return f"{kept} of {size} bytes left"


def _grow(place: Place, r: Random) -> str:
    more = r.choice([b"\0", b"}", b"\n{}", r.randbytes(8), bytes(PAGE), r.randbytes(5 * PAGE)])
    with place.path.open("ab") as file:
        file.write(more)
    return f"{len(more)} bytes more, from {more[:8]!r}"


def _grow_sparsely(place: Place, r: Random) -> str:
    os.truncate(place.path, SPARSE_BYTES)
    return f"{SPARSE_BYTES} bytes, the last of them zeros that take no disk"


def _zero(place: Place, r: Random) -> str:
    data = bytearray(place.path.read_bytes())
    start = r.randrange(0, len(data), PAGE)
    data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    place.path.write_bytes(data)
    return f"zeros from byte {start} on"


def _overwrite(place: Place, r: Random) -> str:
    data = bytearray(place.path.read_bytes())
    start, more = r.randrange(len(data)), r.randbytes(r.randrange(1, 32))
    data[start : start + len(more)] = more
    place.path.write_bytes(data)
    return f"{len(more)} random bytes from byte {start} on"


def _empty(place: Place, r: Random) -> str:
    os.truncate(place.path, 0)
    return "no bytes left"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _replaced_by(make: Callable[[Path], None]) -> Callable[[Place, Random], str]:
    def inflict(place: Place, r: Random) -> str:
        _remove(place.path)
        make(place.path)
        return ""

    return inflict


def _nothing(path: Path) -> None:
    pass


def _folder(path: Path) -> None:
    path.mkdir()


def _file(path: Path) -> None:
    path.write_bytes(b"something else\n")


def _dangling_link(path: Path) -> None:
    path.symlink_to("nowhere at all")


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _zeros_without_end(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _null_device(path: Path) -> None:
    path.symlink_to("/dev/null")


def _behind_link(place: Place, r: Random) -> str:
    aside = place.path.with_name(f"real {place.path.name}")
    place.path.rename(aside)
    place.path.symlink_to(aside.name)
    return "moved, and a link in its place"


FOREIGN: Mapping[str, Callable[[Path], None]] = {
    "notes.txt": _file,
    "notes": _folder,
    ".hidden": _file,
    "of-nowhere": _dangling_link,
    "of-itself": _link_to_itself,
    "pipe": lambda path: os.mkfifo(path),
    "step-9": _folder,
    "step-10": _file,
    "name\nof two lines": _file,
}


def _add_foreign(place: Place, r: Random) -> str:
    name = r.choice(list(FOREIGN))
    FOREIGN[name](place.path / name)
    return f"{name!r} put into it"


def _leave_over(place: Place, r: Random) -> str:
    made = place.path.with_name(f".{place.path.name}.{r.choice(['old', 'new'])}-0badcafe")
    shutil.copytree(place.path, made)
    if r.random() < 0.5:
        _remove(r.choice([path for path in sorted(made.rglob("*")) if path.is_file()]))
    return f"{made.name} beside it, as a crash leaves it"


def _is_saved(place: Place) -> bool:
    return (place.path / "hetu_fx_manifest.json").is_file()


def _take_other(place: Place, r: Random) -> str:
    assert place.other is not None
    shutil.copyfile(place.other, place.path)
    return "that of a set of other values"


def _alike(place: Place) -> list[Path]:
    """Return other files beside it with the same ending: of one save, so that not two are broken."""
    found = sorted(place.path.parent.glob(f"*{place.path.suffix}"))
    return [path for path in found if path.is_file() and path != place.path]


def _exchange(place: Place, r: Random) -> str:
    one = r.choice(_alike(place))
    aside = place.path.with_name("aside")
    place.path.rename(aside)
    one.rename(place.path)
    aside.rename(one)
    return f"exchanged with {one.name}"


def _copy_as_another(place: Place, r: Random) -> str:
    numbers = list(re.finditer(r"\d+", place.path.name))
    found = r.choice(numbers)
    number = str(abs(int(found[0]) + r.choice([1, -1, 7]))).rjust(len(found[0]), "0")
    name = f"{place.path.name[: found.start()]}{number}{place.path.name[found.end() :]}"
    source = place.other if place.other is not None and r.random() < 0.5 else place.path
    shutil.copyfile(source, place.path.with_name(name[:255]))
    return f"{'the other set' if source == place.other else 'it'} copied as {name}"


FILE_FAULTS: Mapping[str, Fault] = {
    "bit flipped": Fault(_is_filled, _flip),
    "truncated": Fault(_is_filled, _truncate),
    "grown": Fault(_is_file, _grow),
    "grown sparsely": Fault(_is_file, _grow_sparsely),
    "zeroed": Fault(_is_filled, _zero),
    "overwritten": Fault(_is_filled, _overwrite),
    "emptied": Fault(_is_filled, _empty),
    "removed": Fault(_anything, _replaced_by(_nothing)),
    "became a folder": Fault(_is_file, _replaced_by(_folder)),
    "became a file": Fault(lambda place: place.path.is_dir(), _replaced_by(_file)),
    "became a pipe": Fault(_anything, _replaced_by(lambda path: os.mkfifo(path))),
    "became a dangling link": Fault(_anything, _replaced_by(_dangling_link)),
    "became a link to itself": Fault(_anything, _replaced_by(_link_to_itself)),
    "became /dev/zero": Fault(_anything, _replaced_by(_zeros_without_end)),
    "became /dev/null": Fault(_anything, _replaced_by(_null_device)),
    "behind a link": Fault(lambda place: place.path.parent == place.root, _behind_link, keeps=True),
    "foreign entry": Fault(lambda place: place.path.is_dir(), _add_foreign, keeps=True),
    "left over": Fault(_is_saved, _leave_over, keeps=True),
    "of other values": Fault(_has_other, _take_other),
    "exchanged": Fault(lambda place: place.path.is_file() and bool(_alike(place)), _exchange),
    "copied as another": Fault(
        lambda place: place.path.is_file() and re.search(r"\d", place.path.name) is not None, _copy_as_another
    ),
}
