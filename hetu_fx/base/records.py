"""JSON objects of dataclasses, written and read by what the fields say.

A `JsonObject` has a key for each field, in order: its values are written as the field's type says, and one that is the
field's default is left out. `Key` says what a key does otherwise. Reading guesses nothing: unknown keys (naming the
nearest known one), wrong types and missing values raise the object's error, always with the place in the document.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from itertools import chain, groupby
from types import NoneType, UnionType
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from hetu_fx.base.documents import json_kind, json_text, nearest, read_json, write_atomically
from hetu_fx.base.json_values import FLAG, INTEGER, INTEGERS, NUMBER, NUMBERS, TEXT, TEXTS, Values, is_object, many
from hetu_fx.errors import HetuFxError

T = TypeVar("T")

REQUIRED: Any = object()
"""Default of a key that has none: leaving it out is an error."""

_OF_FIELD: Any = object()


@dataclass(frozen=True)
class Key:
    """What a key does that its field does not say.

    Attributes:
        of: how its values stand in the file; None: as the field's type says.
        name: in the file; "": the field's.
        alias: another name that is read, never written.
        default: the value where the file has none; left out: the field's.
        written: whether it is written where its value is the default.
        omit: tells which values are not written besides.
        inline: its object's keys stand among those of the record itself.
    """

    of: Values | JsonObject[Any] | None = None
    name: str = ""
    alias: str = ""
    default: Any = _OF_FIELD
    written: Literal["unless default", "always", "never"] = "unless default"
    omit: Callable[[Any], bool] | None = None
    inline: bool = False

    def completed(self, name: str, own: Field[Any] | None, hint: Any, error: type[HetuFxError]) -> Key:
        """Return the key with what its field says."""
        default = self.default
        if default is _OF_FIELD and own is not None:
            made = own.default if own.default_factory is MISSING else own.default_factory()
            default = REQUIRED if made is MISSING else made
        return replace(self, of=self.of or _values_of(hint, error), name=self.name or name, default=default)

    @property
    def values(self) -> Values:
        """Return how its values stand in the file."""
        assert self.of is not None
        return self.of.values if isinstance(self.of, JsonObject) else self.of

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names under which it is read."""
        if isinstance(self.of, JsonObject) and self.inline:
            return self.of.known
        return (self.name, self.alias) if self.alias else (self.name,)

    def omits(self, value: Any) -> bool:
        """Tell whether a value is not written."""
        return (self.omit is not None and self.omit(value)) or (self.written != "always" and value == self.default)


@dataclass(frozen=True)
class JsonObject(Generic[T]):
    """The JSON object of a class.

    Attributes:
        build: makes the value of what was read, by names of fields.
        error: what reading raises.
        keys: by names of fields, in the order in which they are written.
        format: the first line of a document, such as `hetu_fx.plan/1`; "": it stands in another.
        later: keys that are understood but not supported, each with what to do instead.
        check: looks at what was read before it is built, and is told the place.
        pack: returns what has the fields; the other way round than `build`.
    """

    build: Callable[..., T]
    error: type[HetuFxError]
    keys: Mapping[str, Key]
    format: str = ""
    later: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[str, Mapping[str, Any]], None] | None = None
    pack: Callable[[T], Any] | None = None

    @property
    def values(self) -> Values:
        """Return how its objects stand in a file."""
        return Values("an object", is_object, self.read, self.write)

    @property
    def known(self) -> tuple[str, ...]:
        """Return the names of all keys."""
        return (*(("format",) if self.format else ()), *chain.from_iterable(key.names for key in self.keys.values()))

    def write(self, value: T) -> dict[str, Any]:
        """Return the JSON object of a value."""
        packed = self.pack(value) if self.pack else value
        result: dict[str, Any] = {"format": self.format} if self.format else {}
        for name, key in self.keys.items():
            if key.written != "never" and not key.omits(part := getattr(packed, name)):
                written = key.values.write(part)
                result |= written if key.inline else {key.name: written}
        return result

    def read(self, value: Any, where: str) -> T:
        """Return the value of a JSON object; raise the record's error with the place."""
        if not is_object(value):
            raise self.error(f"{where} must be an object, not {json_kind(value)}")
        known = self.known
        for key in value:
            if key in self.later:
                raise self.error(f"{where}: {key!r} is not supported\nhint: {self.later[key]}")
            if key not in known:
                raise self.error(f"{where}: unknown key {key!r}{nearest(str(key), known)}")
        if self.format:
            self._check_format(value, where)
        return self.read_among(value, where)

    def read_among(self, value: Mapping[str, Any], where: str) -> T:
        """Return the value that some keys of an object say, whose other keys are of something else."""
        parts = {name: self._part(key, value, where) for name, key in self.keys.items()}
        if self.check is not None:
            self.check(where, parts)
        try:
            return self.build(**parts)
        except HetuFxError as problem:
            raise self.error(f"{where}: {problem}") from None

    def _part(self, key: Key, value: Mapping[str, Any], where: str) -> Any:
        if key.inline:
            assert isinstance(key.of, JsonObject)
            return key.of.read_among(value, where)
        given = [name for name in key.names if name in value]
        if len(given) > 1:
            raise self.error(
                f"{where}: {' and '.join(map(repr, given))} are two names of one thing\nhint: give one of them"
            )
        if not given:
            if key.default is REQUIRED:
                raise self.error(f"{where}: {key.name!r} is missing\nhint: give {key.values.what}")
            return key.default
        name, found = given[0], value[given[0]]
        if not key.values.fits(found):
            raise self.error(f"{where}: {name!r} must be {key.values.what}, not {json_kind(found)}")
        return key.values.read(found, f"{where}{': ' if self.format else '.'}{name}")

    def _check_format(self, value: Mapping[str, Any], where: str) -> None:
        found = self._part(Key(TEXT, "format", default=REQUIRED), value, where)
        if found != self.format:
            raise self.error(
                f"{where}: format is {found!r}, but this version reads {self.format!r} only\n"
                f"hint: write the file again, or read it with the version that wrote it"
            )


class Document:
    """A value that has a file of its own; `form` is what stands there."""

    __slots__ = ()
    form: ClassVar[JsonObject[Any]]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of its file."""
        return self.form.write(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "") -> Self:
        """Build the value of a file's JSON object; `where` is shown in errors, left out: what it is a file of."""
        found: Self = cls.form.read(value, where or cls.__name__.lower())
        return found

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file. Raises its form's error, naming the file, the place in it, the value and what to do."""
        return cls.from_json(read_json(path, cls.form.error), os.fspath(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file, atomically."""
        write_atomically(path, json_text(self.to_json()) + "\n")


def record(
    build: Callable[..., T],
    error: type[HetuFxError],
    *,
    like: type[Any] | None = None,
    order: str = "",
    format: str = "",
    later: Mapping[str, str] | None = None,
    check: Callable[[str, Mapping[str, Any]], None] | None = None,
    pack: Callable[[T], Any] | None = None,
    **keys: Key,
) -> JsonObject[T]:
    """Return the JSON object of a dataclass.

    Args:
        build: the dataclass, or what makes the value of the fields of another.
        error: what reading raises.
        like: the dataclass whose fields are the keys; None: `build`.
        order: names of the fields, and of keys that are read only, as they are written; "": as they are declared.
        format: see `JsonObject`, as for `later`, `check` and `pack`.
        later: by key.
        check: of what was read.
        pack: into what has the fields.
        keys: a `Key` for each field that does not say all by itself.
    """
    kind: Any = like or build
    hints, own = get_type_hints(kind), {one.name: one for one in fields(kind) if one.init}
    made = {
        name: keys.get(name, Key()).completed(name, own.get(name), hints.get(name), error)
        for name in (order.split() or own)
    }
    return JsonObject(build, error, made, format, later or {}, check, pack)


def _values_of(hint: Any, error: type[HetuFxError]) -> Values:
    """Return how values of a type stand in a file."""
    plain: dict[Any, Values] = {int: INTEGER, float: NUMBER, str: TEXT, bool: FLAG}
    plain |= {tuple[int, ...]: INTEGERS, tuple[float, ...]: NUMBERS, tuple[str, ...]: TEXTS}
    if hint in plain:
        return plain[hint]
    if is_dataclass(hint) and isinstance(hint, type):
        return record(hint, error).values
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) is Literal:
        return TEXT
    if get_origin(hint) is tuple and kinds[1:] == [Ellipsis]:
        return many(_values_of(kinds[0], error))
    if get_origin(hint) in (Union, UnionType) and len(kinds) == 1:
        return _values_of(kinds[0], error)
    raise TypeError(f"no JSON form for {hint}\nhint: give a Key(of=...)")


@dataclass(frozen=True, slots=True)
class _Repeat:
    """Some equal values in a row."""

    one: Any
    count: int = 1


def run_length_list(one: JsonObject[Any]) -> Values:
    """Return a list of objects, of equal ones in a row a single one with their `count`."""

    def check(where: str, parts: Mapping[str, Any]) -> None:
        if parts["count"] < 1:
            raise one.error(f"{where}: count is {parts['count']}\nhint: give the number of equal ones in a row, from 1")

    run = record(
        _Repeat, one.error, order="count one", one=Key(one, inline=True), count=Key(written="always"), check=check
    )
    runs = many(run.values)
    return Values(
        runs.what,
        runs.fits,
        lambda values, where: tuple(run.one for run in runs.read(values, where) for _ in range(run.count)),
        lambda values: runs.write(_Repeat(value, len(list(same))) for value, same in groupby(values)),
    )
