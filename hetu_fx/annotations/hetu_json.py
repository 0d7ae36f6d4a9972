"""Hetu v2's own JSON for annotations, read and written.

    {"split": {"0": [4, 1]}, "dup": [2, 2], "device_group_union": [[1, 2, 3, 4], [9]], "type": "variable"}

One entry per subgroup. Hetu has no field for how a tensor is spread over subgroups (HDim): a "variable"
(parameter) is duplicated, a "placeholder" (data) split along dim 0 in equal parts. And it multiplies the
number of subgroups (HSize) into the degrees of that axis: above, both `dup` are 1 times HSize 2. Axes have a
fixed order: the duplicate is slowest in a variable and fastest in a placeholder, splits go by dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.states import DeviceGroup, Duplicate, Sharding, Split, State
from hetu_fx.errors import AnnotationError

_KINDS = ("placeholder", "variable")
_KEYS = {"split", "dup", "device_group_union", "type"}


def read_leaf(leaf: Mapping[str, Any]) -> Annotation:
    """Read one leaf of a Hetu plan; raise AnnotationError where it contradicts itself."""
    missing = _KEYS - set(leaf)
    if missing or leaf["type"] not in _KINDS:
        raise AnnotationError(f"a Hetu leaf needs {sorted(_KEYS)} and a type of {_KINDS}, got {dict(leaf)}")
    union = [DeviceGroup(tuple(ranks)) for ranks in leaf["device_group_union"]]
    number, kind = len(union), leaf["type"]
    splits = {int(dim): list(degrees) for dim, degrees in leaf["split"].items()}
    duplicates = list(leaf["dup"])
    if any(len(degrees) != number for degrees in (duplicates, *splits.values())):
        raise AnnotationError(f"a Hetu leaf needs one entry per subgroup ({number}), got {dict(leaf)}")
    if kind == "variable":
        duplicates = _without_factor(duplicates, number, leaf)
    else:
        splits[0] = _without_factor(splits.get(0, [1] * number), number, leaf)
    shardings = [
        _sharding(kind, {dim: degrees[index] for dim, degrees in splits.items()}, duplicates[index])
        for index in range(number)
    ]
    return Annotation(tuple(union), tuple(shardings), _top(kind, number))


def write_leaf(annotation: Annotation, kind: str) -> dict[str, Any]:
    """Write an annotation as a leaf of `kind` "variable" or "placeholder".

    Raises AnnotationError for what this JSON cannot say: ratios, sub-factors, partial, another top or order.
    """
    if kind not in _KINDS:
        raise AnnotationError(f"a Hetu leaf is of type {_KINDS}, not {kind!r}")
    number = len(annotation.groups)
    if annotation.top != _top(kind, number):
        raise AnnotationError(f"a Hetu {kind} over {number} groups has top {_top(kind, number)}: {annotation}")
    degrees = [_degrees(sharding, kind, annotation) for sharding in annotation.shardings]
    dims = sorted({dim for splits, _ in degrees for dim in splits})
    split_factor, dup_factor = (1, number) if kind == "variable" else (number, 1)
    if split_factor > 1 and 0 not in dims:
        dims = [0, *dims]
    return {
        "split": {
            str(dim): [splits.get(dim, 1) * (split_factor if dim == 0 else 1) for splits, _ in degrees] for dim in dims
        },
        "dup": [duplicate * dup_factor for _, duplicate in degrees],
        "device_group_union": [list(group.ranks) for group in annotation.groups],
        "type": kind,
    }


def read_leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Annotation]]:
    """Walk a Hetu plan and give (dotted path, annotation) of every leaf; other entries are passed over."""
    if "device_group_union" in tree:
        yield path, read_leaf(tree)
        return
    for key, child in tree.items():
        if isinstance(child, Mapping):
            yield from read_leaves(child, f"{path}.{key}" if path else key)


def _top(kind: str, number: int) -> State | None:
    if number == 1:
        return None
    return Duplicate(number) if kind == "variable" else Split.even(0, number)


def _without_factor(degrees: Sequence[int], number: int, leaf: Mapping[str, Any]) -> list[int]:
    if any(degree % number for degree in degrees):
        axis = "dup" if leaf["type"] == "variable" else "split of dim 0"
        raise AnnotationError(f"the {axis} of a Hetu leaf holds a factor of {number}, got {dict(leaf)}")
    return [degree // number for degree in degrees]


def _sharding(kind: str, splits: Mapping[int, int], duplicate: int) -> Sharding:
    axes: list[State] = [Split.even(dim, ways) for dim, ways in sorted(splits.items())]
    copies = Duplicate(duplicate)
    return Sharding((copies, *axes) if kind == "variable" else (*axes, copies))


def _degrees(sharding: Sharding, kind: str, annotation: Annotation) -> tuple[dict[int, int], int]:
    splits = {split.dim: split.ways for split in sharding.splits}
    duplicate = sharding.ways // math.prod(splits.values())
    if _sharding(kind, splits, duplicate) != sharding:
        raise AnnotationError(
            f"Hetu's JSON cannot say {annotation} of a {kind}: only even splits and duplicates, in its order"
        )
    return splits, duplicate
