"""What can stand wrongly in the header of a safetensors file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from tests.broken_files.document_faults import header_of, put_header
from tests.broken_files.faults import Fault, Place

Entry = dict[str, Any]


def _length(place: Place, r: Random) -> str:
    data = place.path.read_bytes()
    (right,) = struct.unpack("<Q", data[:8])
    wrong = r.choice([0, 1, right - 1, right + 1, right + 8, len(data) - 8, len(data), 2**31, 2**40, 2**63, 2**64 - 1])
    place.path.write_bytes(struct.pack("<Q", wrong) + data[8:])
    return f"length {wrong} for {right}"


def _of_one(change: Callable[[Entry, Mapping[str, Entry], Random], None]) -> Callable[[Place, Random], str]:
    """Return what changes the entry of one tensor."""

    def inflict(place: Place, r: Random) -> str:
        header, behind = header_of(place.path)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        name = r.choice(sorted(tensors))
        change(tensors[name], tensors, r)
        put_header(place.path, json.dumps(header), behind)
        return f"{name}: {json.dumps(tensors[name])}"

    return inflict


def _offsets(entry: Entry, tensors: Mapping[str, Entry], r: Random) -> None:
    start, stop = entry["data_offsets"]
    other = r.choice(sorted(tensors))
    entry["data_offsets"] = r.choice(
        [[stop, start], [start + 1, stop + 1], [start, stop + 4], [0, 2**60], [2**63, 2**63 + stop - start],
         [-8, stop - start - 8], tensors[other]["data_offsets"], [start], [], [start, stop, stop]]
    )  # fmt: skip


def _dtype(entry: Entry, tensors: Mapping[str, Entry], r: Random) -> None:
    alike = {"F32": "I32", "I64": "F64", "F64": "I64", "BF16": "F16", "F16": "BF16"}
    entry["dtype"] = r.choice([alike.get(entry["dtype"], "U8"), "F7", "", "F64", "BOOL", "F8_E4M3"])


def _shape(entry: Entry, tensors: Mapping[str, Entry], r: Random) -> None:
    shape = entry["shape"]
    size = 1
    for one in shape:
        size *= one
    entry["shape"] = r.choice(
        [[2**60], [2**32, 2**32], [0, 2**62], [-1], [size], shape[::-1], [1, *shape], [], [1] * 70]
    )


def _names(place: Place, r: Random) -> str:
    header, behind = header_of(place.path)
    names = [name for name in header if name != "__metadata__"]
    form = {name: (header[name]["dtype"], tuple(header[name]["shape"])) for name in names}
    pairs = [(a, b) for a in names for b in names if a < b and form[a] == form[b]]
    one, other = r.choice(pairs) if pairs else (r.choice(names), "unknown")
    header[one], header[other] = header.get(other), header[one]
    put_header(place.path, json.dumps({name: entry for name, entry in header.items() if entry is not None}), behind)
    return f"{one!r} and {other!r} exchanged"


def _left_out(place: Place, r: Random) -> str:
    header, behind = header_of(place.path)
    name = r.choice(sorted(header))
    del header[name]
    put_header(place.path, json.dumps(header), behind)
    return f"without {name!r}"


def _data(place: Place, r: Random) -> str:
    header, behind = header_of(place.path)
    data = bytearray(behind)
    bit = r.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    put_header(place.path, json.dumps(header, separators=(",", ":")), bytes(data))
    return f"bit {bit} of {8 * len(data)}"


def _fault(inflict: Callable[[Place, Random], str]) -> Fault:
    return Fault(lambda place: place.path.is_file() and place.path.suffix == ".safetensors", inflict)


TENSOR_FAULTS: Mapping[str, Fault] = {
    f"tensors: {name}": _fault(inflict)
    for name, inflict in {
        "length of the header": _length,
        "offsets": _of_one(_offsets),
        "dtype": _of_one(_dtype),
        "shape": _of_one(_shape),
        "bit of the data": _data,
        "names exchanged": _names,
        "entry left out": _left_out,
    }.items()
}
