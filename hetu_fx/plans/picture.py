"""A plan as notebooks and reports show it: a table of pipelines, stages and devices, with bars for their shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hetu_fx.base.words import ranks_text, share_text
from hetu_fx.plans.prediction import Prediction
from hetu_fx.plans.stage import Pipeline
from hetu_fx.plans.tables import (
    LikeDeviceGroup,
    blocks_text,
    busy_shares,
    busy_text,
    device_groups,
    left_out_text,
    limit_text,
    memory_text,
)
from hetu_fx.show.markup import COLOURS, bar, cells_table, keys, note

_ROWS, _SHARD, _MEMORY, _BUSY = COLOURS[:4]
_MEANINGS = {
    "rows: of the batch": _ROWS,
    "shard: of what the stage cuts": _SHARD,
    "memory: of what the device has": _MEMORY,
    "busy: not waiting for others": _BUSY,
}
_PLACE = ("pipeline", "micro-batches", "stage", "blocks", "device", "rows", "shard")
_PREDICTED = ("memory", "busy")


def plan_html(title: str, pipelines: Sequence[Pipeline], predicted: Prediction | None) -> str:
    """Return the table, with what its bars mean, below a title and the devices that are left out."""
    groups = list(device_groups(pipelines, predicted))
    notes = (title, *left_out_text(pipelines, predicted))
    is_predicted = any(group.costs for group in groups)
    header = [*_PLACE, *(_PREDICTED if is_predicted else ())]
    meanings = dict(list(_MEANINGS.items())[: 4 if is_predicted else 2])
    table = cells_table(header, (_row(group)[: len(header)] for group in groups))
    return f'<div class="short">{"".join(map(note, notes))}{table}{keys(meanings)}</div>'


def _row(group: LikeDeviceGroup) -> list[str]:
    """Return the cells of devices that do the same, as HTML; of several the most memory and the least busy."""
    found, one = group.alike, group.alike.pipeline
    pipelines, positions = group.place
    place = [pipelines, str(one.micro_batches), positions, blocks_text(found.stage), ranks_text(group.ranks)]
    shares = [_share(share_text(group.rows) + limit_text(one), group.rows, _ROWS)]
    shares += [_share(share_text(group.shard), group.shard, _SHARD)]
    return [*map(escape, place), *shares, *(_predicted(group) if group.costs else ("", ""))]


def _predicted(group: LikeDeviceGroup) -> Iterator[str]:
    most, busy = group.most, busy_shares(group.costs)
    yield _share(memory_text(most), most.total_bytes / most.limit_bytes if most.limit_bytes else 0.0, _MEMORY)
    yield _share(busy_text(group.costs), min(busy, default=0.0), _BUSY)


def _share(text: str, share: float, colour: str) -> str:
    """Return a share as text, with a bar below it."""
    return escape(text) + bar([(text, share, colour)], 1.0)
