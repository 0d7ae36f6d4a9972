"""Reading the log of a run, line by line: entries as this release writes them, whichever release has written them.

`_FORMS` is the table by which a log is checked: what each kind of its entries has, key by key.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from hetu_fx.base.documents import json_kind, nearest, open_regular, parse_json, told_as_damaged
from hetu_fx.base.json_values import (
    INTEGER,
    INTEGERS,
    NUMBER,
    NUMBERS,
    TEXT,
    TEXTS,
    Values,
    is_object,
    many,
    object_by_number,
)
from hetu_fx.base.records import REQUIRED, Document, JsonObject, Key
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import EnvironmentProblem, HetuFxError, StateError
from hetu_fx.planner.values.gathered_op import GATHERED_OP
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from hetu_fx.report.rates import RATES
from hetu_fx.report.run_log import FORMAT
from hetu_fx.report.updates import Entry

_ABSENT: Any = object()
"""Default of a key that an entry need not have."""


def _checked_entry(value: Any, where: str) -> Entry:
    """Return an entry as this release writes it, whichever release has written it.

    Args:
        value: what a line of a log says.
        where: the line and the file, for errors.

    Raises:
        StateError: it is no entry; the error names the line, the key and the value.
    """
    if not is_object(value) or not isinstance(value.get("event"), str):
        raise StateError(f"{where} is no entry: {json_kind(value)}; give a log as hetu_fx wrote it")
    event = value["event"]
    if event not in _FORMS:
        raise StateError(f"{where}: there is no entry {event!r}{nearest(event, tuple(_FORMS))}")
    return _FORMS[event].read(value, f"{where}: {event}")


def _entry(**parts: Any) -> Entry:
    return {name: part for name, part in parts.items() if part is not _ABSENT}


def _document(kind: type[Document]) -> Values:
    """Return the JSON object of a document that stands in an entry."""

    def read(value: Any, where: str) -> None:
        try:
            with told_as_damaged(where, StateError):  # a log may have NaN, which no file of a document has
                kind.from_json(value, where)
        except HetuFxError as problem:
            raise StateError(str(problem)) from None

    return Values("an object", is_object, read)


def _or_null(values: Values) -> Values:
    return Values(
        f"{values.what} or null",
        lambda value: value is None or values.fits(value),
        lambda value, where: None if value is None else values.read(value, where),
    )


def _keys(values: Mapping[str, Values], default: Any = REQUIRED) -> dict[str, Key]:
    """Return keys whose values are checked, and stay as JSON has them: an entry is what JSON can say."""

    def kept(of: Values) -> Values:
        def read(value: Any, where: str) -> Any:
            of.read(value, where)
            return value

        return Values(of.what, of.fits, read)

    return {name: Key(kept(of), name, default=default) for name, of in values.items()}


def _form(keys: Mapping[str, Key]) -> JsonObject[Entry]:
    return JsonObject(_entry, StateError, {**_keys({"event": TEXT}), **keys, **_keys({"time": NUMBER}, _ABSENT)})


def _is_span(value: Any) -> bool:
    """Tell whether a value is a name, a kind, a start and an end."""
    if not isinstance(value, list) or [type(part) for part in value[:2]] != [str, str]:
        return False
    times = value[2:]
    return len(times) == 2 and all(map(NUMBER.fits, times)) and all(map(math.isfinite, times)) and times[0] <= times[1]


_SPANS = Values(
    "a list of [name, kind, start, end]", lambda value: isinstance(value, list) and all(map(_is_span, value))
)
_RATES = object_by_number("devices", StateError)
_AT = _keys({"step": INTEGER})
_PLANNED = {**_keys({"name": TEXT, "plan": _document(Plan)}), **_keys({"rates": _RATES}, {})}
_RAN = {
    **_AT,
    **_keys({"variant": TEXT, "seconds": NUMBER}),
    **_keys({"loss": _or_null(NUMBER)}, None),
    **_keys({"longest": INTEGER, "rows": INTEGERS}, _ABSENT),
}
_FORMS: Mapping[str, JsonObject[Entry]] = {
    "start": _form(
        _keys({"format": TEXT, "processes": INTEGER, "variants": TEXTS})
        | _keys({"plans": many(JsonObject(_entry, StateError, _PLANNED).values)}, ())
        | _keys({"cluster": _or_null(_document(Cluster)), "profile": _or_null(_document(Profile))}, None)
    ),
    "plan": _form(_AT | _PLANNED),
    "cluster": _form(_AT | _keys({"cluster": _or_null(_document(Cluster))})),
    "health": _form(_AT | _keys({"rates": _RATES})),
    "memory": _form(_AT | _keys({"peak_bytes": NUMBERS})),
    "gathered": _form(_AT | _keys({"variant": TEXT, "ops": many(GATHERED_OP.values)})),
    "switch": _form(_AT | _keys({"from": TEXT, "to": TEXT})),
    "built": _form(_AT | _keys({"variant": TEXT, "bytes": NUMBER, "seconds": NUMBER})),
    "evicted": _form(_AT | _keys({"variant": TEXT, "bytes": NUMBER})),
    "moved": _form(_AT | _keys({"bytes": NUMBER, "seconds": NUMBER}) | _keys({"why": TEXT}, _ABSENT)),
    "arrived": _form(_AT | _keys({"bytes": NUMBER, "seconds": NUMBER, "waited_seconds": NUMBER})),
    "step": _form(
        _RAN
        | _keys({"predicted_seconds": _or_null(NUMBER)})
        | _keys({"compute_seconds": NUMBERS, "host_seconds": NUMBERS}, ())
        | _keys({"planning_seconds": NUMBER, "waited_seconds": NUMBER, "micro_steps": INTEGER}, _ABSENT)
        | _keys({"tokens": INTEGER, "flops": NUMBER, **RATES}, _ABSENT)
    ),
    "evaluation": _form(_RAN),
    "trace": _form(_AT | _keys({"variant": TEXT, "rank": INTEGER, "seconds": NUMBER, "spans": _SPANS})),
    "lost": _form(_AT | _keys({"why": TEXT})),
}
"""By `event`. Keys with a default other than `_ABSENT` are those that older logs lack."""


_FORMATS = ("hetu_fx.log/1", FORMAT)

MOST_LINE_BYTES = 64 << 20
"""Of a line; the longest, the start of a job of 1,024 devices, has half a million."""


def read_log(path: str | os.PathLike[str]) -> tuple[Entry, ...]:
    """Read a log of any length; a last line cut short by a kill is left out.

    Raises:
        EnvironmentProblem: the file cannot be read.
        StateError: it is no log, one of a format that this release does not know, or an entry is not as hetu_fx writes
            it: the error names line and key.
    """
    found = list[Entry]()
    for where, value in _values(path):
        if not found:
            _check_start(path, value)
        found.append(_checked_entry(value, where))
    if not found:
        _check_start(path, None)
    return tuple(found)


def _values(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Yield where a line is, and what it says."""
    with open_regular(path, EnvironmentProblem) as file:
        torn: StateError | None = None
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), 1):
            if torn is not None:
                raise torn
            where = f"line {number} of {os.fspath(path)}"
            if len(line) > MOST_LINE_BYTES:
                raise StateError(f"{where} has more than {MOST_LINE_BYTES} bytes; give a log as hetu_fx wrote it")
            try:
                value = parse_json(line, where, StateError, constants=True)
            except StateError as problem:
                torn = problem
            else:
                yield where, value


def _check_start(path: str | os.PathLike[str], value: Any) -> None:
    """Raise `StateError` where the first entry is none of a log that can be read."""
    told = value.get("format") if isinstance(value, dict) else None
    if told in _FORMATS and value.get("event") == "start":
        return
    if str(told).startswith("hetu_fx.log/") and told not in _FORMATS:
        raise StateError(
            f"{os.fspath(path)} is a log of the format {told!r}; this release reads {', '.join(_FORMATS)}; read it "
            f"with the release of hetu_fx that wrote it, or a newer one"
        )
    raise StateError(f"{os.fspath(path)} is not a log of the format {FORMAT!r}; give a file of model.hetu.log")
