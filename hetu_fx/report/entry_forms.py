"""What each kind of a log's entries has, key by key: the table by which a log is checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetu_fx.base.documents import kind_of, nearest, told_as_damaged
from hetu_fx.base.json_values import INTEGER, INTEGERS, NUMBER, NUMBERS, TEXT, TEXTS, Values, is_object, many, numbered
from hetu_fx.base.records import REQUIRED, Document, JsonObject, Key
from hetu_fx.cluster.cluster import Cluster
from hetu_fx.errors import HetuFxError, StateError
from hetu_fx.planner.values.gathered_op import GATHERED_OP
from hetu_fx.planner.values.profile_file import Profile
from hetu_fx.plans.plan import Plan
from hetu_fx.report.run_log import Entry

_ABSENT: Any = object()
"""Default of a key that an entry need not have."""


def checked_entry(value: Any, where: str) -> Entry:
    """Return an entry as this release writes it, whichever release has written it.

    Args:
        value: what a line of a log says.
        where: the line and the file, for errors.

    Raises:
        StateError: it is no entry; the error names the line, the key and the value.
    """
    if not is_object(value) or not isinstance(value.get("event"), str):
        raise StateError(f"{where} is no entry: {kind_of(value)}; give a log as hetu_fx wrote it")
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


_RATES = numbered("devices", StateError)
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
        | _keys({"planning_seconds": NUMBER, "waited_seconds": NUMBER}, _ABSENT)
    ),
    "evaluation": _form(_RAN),
}
"""By `event`. Keys with a default other than `_ABSENT` are those that older logs lack."""
