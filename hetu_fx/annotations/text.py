"""The text form of annotations, for graphs, plan files and messages.

    [0-3] S(0, 2:1) D(2)                        one group; last axis fastest
    S(0, 3:1) over {[0,1] S(1, 2); [2]}         a union: top state, then the groups
    [0,1] S(0, 2:1, 3x_x64)                     a split of the middle factor of (3, middle, 64)

`S(dim, parts)`: parts are units `2:1`, or a number of equal parts. `D(ways)`, `P(ways)`: duplicate, partial.
"""

from __future__ import annotations

import re
from functools import lru_cache

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.sharding import DeviceGroup, Sharding
from hetu_fx.annotations.states import Duplicate, Partial, Split, State
from hetu_fx.errors import AnnotationError

_STATE = re.compile(r"S\((\d+), *([\d:]+)(?:, *(\d+)x_x(\d+))?\)|D\((\d+)\)|P\((\d+)\)")
_GROUP = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]((?: +[SDP]\([^)]*\))*)")
_UNION = re.compile(r"([SDP]\([^)]*\)) over \{(.*)\}")


@lru_cache(maxsize=4096)
def parse_annotation(text: str) -> Annotation:
    """Read what `str(annotation)` wrote; raise AnnotationError on anything else."""
    union = _UNION.fullmatch(text.strip())
    if union is None:
        group, sharding = _parse_member(text, text)
        return Annotation((group,), (sharding,))
    members = [_parse_member(part, text) for part in union[2].split(";")]
    return Annotation(
        tuple(group for group, _ in members),
        tuple(sharding for _, sharding in members),
        _parse_state(union[1], text),
    )


def _parse_member(member: str, text: str) -> tuple[DeviceGroup, Sharding]:
    match = _GROUP.fullmatch(member.strip())
    if match is None:
        raise _malformed(member, text)
    ranks: list[int] = []
    for piece in match[1].split(","):
        first, _, last = piece.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    states = re.findall(r"[SDP]\([^)]*\)", match[2])
    return DeviceGroup(tuple(ranks)), Sharding(tuple(_parse_state(state, text) for state in states))


def _parse_state(state: str, text: str) -> State:
    match = _STATE.fullmatch(state)
    if match is None:
        raise _malformed(state, text)
    dim, parts, outer, inner, duplicate, partial = match.groups()
    if duplicate is not None:
        return Duplicate(int(duplicate))
    if partial is not None:
        return Partial(int(partial))
    units = tuple(map(int, parts.split(":"))) if ":" in parts else (1,) * int(parts)
    return Split(int(dim), units, int(outer or 1), int(inner or 1))


def _malformed(part: str, text: str) -> AnnotationError:
    return AnnotationError(
        f"cannot read {part.strip()!r} in annotation {text!r}; write it like '[0-3] S(0, 2:1) D(2)' "
        f"or 'D(2) over {{[0,1] S(0, 2); [2]}}'"
    )
