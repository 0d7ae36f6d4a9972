"""Take a device's part out of a tensor, by its annotation."""

from __future__ import annotations

from torch import Tensor

from hetu_fx.annotations.annotation import Annotation
from hetu_fx.annotations.region import Box


def local_part(whole: Tensor, annotation: Annotation, rank: int) -> Tensor:
    """Return a rank's part of a whole tensor; a view where it is one box, else a copy."""
    region = annotation.region(rank, tuple(whole.shape))
    boxes = region.boxes
    if len(boxes) == 1:
        return whole[index(boxes[0])]
    shape = [size for size in annotation.local_shape(rank, tuple(whole.shape)) if size is not None]
    part = whole.new_empty(shape)
    for box, local in zip(boxes, region.local_boxes, strict=True):
        part[index(local)] = whole[index(box)]
    return part


def index(box: Box) -> tuple[slice, ...]:
    """Turn a box into the index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box.bounds)
