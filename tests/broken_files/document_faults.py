"""What can stand wrongly in a document: JSON, a line of JSON, or JSON in the header of a file of tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from tests.broken_files.faults import Fault, Place

DEPTH = 100_000
LONG = 200_000
_HOLE = "@hole@"

Slot = tuple[Any, Any]
"""A container, and the key or the index of a value in it."""
Edit = Callable[[str, Random], str]


def slots(value: Any) -> Iterator[Slot]:
    """Yield the places of all values in a document."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from slots(inner)


def with_raw(text: str, r: Random, raw: Callable[[Any, Slot, Random], str], wanted: Callable[[Slot], bool]) -> str:
    """Return a document in which the text of one value, chosen of those wanted, is another."""
    document = json.loads(text)
    found = [slot for slot in slots(document) if wanted(slot)]
    if not found:
        return raw(document, ([], 0), r)
    container, key = slot = r.choice(found)
    value, container[key] = container[key], _HOLE
    return json.dumps(document).replace(json.dumps(_HOLE), raw(value, slot, r))


def _any(slot: Slot) -> bool:
    return True


def _is_text(slot: Slot) -> bool:
    return isinstance(slot[0][slot[1]], str)


def _is_keyed(slot: Slot) -> bool:
    return isinstance(slot[0], dict)


def _is_number(slot: Slot) -> bool:
    return isinstance(slot[0][slot[1]], (int, float)) and not isinstance(slot[0][slot[1]], bool)


def _edit(raw: Callable[[Any, Slot, Random], str], wanted: Callable[[Slot], bool] = _any) -> Edit:
    return lambda text, r: with_raw(text, r, raw, wanted)


def _fixed(*raws: str, wanted: Callable[[Slot], bool] = _any) -> Edit:
    return _edit(lambda value, slot, r: r.choice(raws), wanted)


def _another_kind(value: Any, slot: Slot, r: Random) -> str:
    others = [
        other for other in (None, True, 7, 0.5, "text", [], [1, "a"], {}, {"a": 1}) if type(other) is not type(value)
    ]
    return json.dumps(r.choice(others))


def _doubled(value: Any, slot: Slot, r: Random) -> str:
    return f"{json.dumps(value)}, {json.dumps(slot[1])}: {r.choice([json.dumps(value), '0', 'null', '[]'])}"


def _remove_key(text: str, r: Random) -> str:
    document = json.loads(text)
    found = list(slots(document))
    if found:
        container, key = r.choice(found)
        del container[key]
    return json.dumps(document)


def _rename_key(text: str, r: Random) -> str:
    document = json.loads(text)
    found = list(filter(_is_keyed, slots(document)))
    if found:
        container, key = r.choice(found)
        container[r.choice([f"{key}x", "", "../x", "/etc/passwd", "a\0b", "weiß\ud800"])] = container.pop(key)
    return json.dumps(document)


def _neighbour(value: Any, slot: Slot, r: Random) -> str:
    if isinstance(value, (int, float)):
        return json.dumps(r.choice([value + 1, value - 1, 2 * value, 0]))
    return json.dumps(f"{value}x")


PATHS = ("../x", "../../../../../../etc/passwd", "/etc/passwd", "/dev/zero", "", ".", "a\0b", "\ud800", "x" * 5000)

EDITS: Mapping[str, Edit] = {
    "another kind": _edit(_another_kind),
    "NaN": _fixed("NaN", "Infinity", "-Infinity"),
    "NaN for a number": _fixed("NaN", "Infinity", "-Infinity", wanted=_is_number),
    "1e999": _fixed("1e999", "-1e999", wanted=_is_number),
    "-1": _fixed("-1", wanted=_is_number),
    "2**70": _fixed(str(2**70), "-" + str(2**63), str(2**31), wanted=_is_number),
    "10,000 digits": _fixed("9" * 10_000),
    "next number": _edit(_neighbour, lambda slot: _is_number(slot) or _is_text(slot)),
    "long list": _edit(lambda value, slot, r: "[" + "0," * LONG + "0]"),
    "long text": _edit(lambda value, slot, r: '"' + "x" * LONG + '"'),
    "deep": _edit(lambda value, slot, r: r.choice(["[" * DEPTH + "]" * DEPTH, '{"a":' * DEPTH + "0" + "}" * DEPTH])),
    "key removed": _remove_key,
    "key renamed": _rename_key,
    "key twice": _edit(_doubled, _is_keyed),
    "path": _edit(lambda value, slot, r: json.dumps(r.choice(PATHS)), _is_text),
    "is another value": lambda text, r: r.choice(["[]", "{}", "0", "null", '"text"', "[[]]", '{"a": {}}', "[" * DEPTH]),
}


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a file of tensors, and the bytes behind it."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header, data[8 + length :]


def put_header(path: Path, text: str, behind: bytes) -> None:
    """Write a file of tensors with another header, of any text."""
    raw = text.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + behind)


def _edit_document(path: Path, r: Random, edit: Edit) -> str:
    text = path.read_text()
    if path.suffix == ".json":
        path.write_text(edit(text, r), errors="surrogatepass")
        return "in it"
    lines = text.splitlines()
    number = r.randrange(len(lines))
    lines[number] = edit(lines[number], r)
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
    return f"in line {number + 1}"


def _edit_header(path: Path, r: Random, edit: Edit) -> str:
    header, behind = header_of(path)
    inner = [key for key, value in header.get("__metadata__", {}).items() if value[:1] in "{["]
    if inner and r.random() < 0.7:
        key = r.choice(inner)
        header["__metadata__"][key] = edit(header["__metadata__"][key], r)
        put_header(path, json.dumps(header), behind)
        return f"in {key!r} of its header"
    put_header(path, edit(json.dumps(header), r), behind)
    return "in its header"


def _fault(edit: Edit) -> Fault:
    def inflict(place: Place, r: Random) -> str:
        return (_edit_header if place.path.suffix == ".safetensors" else _edit_document)(place.path, r, edit)

    return Fault(
        lambda place: place.path.is_file() and place.path.suffix in (".json", ".jsonl", ".safetensors"), inflict
    )


DOCUMENT_FAULTS: Mapping[str, Fault] = {f"document: {name}": _fault(edit) for name, edit in EDITS.items()}
