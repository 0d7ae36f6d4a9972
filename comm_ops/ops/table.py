"""Communication: the ops, and the one resolver that picks them.

`OPS` is the table of records, by name; importing it registers them all with torch as `hetu::name`. Those of one tensor,
which the resolver picks from, are `COMM_OPS`; the others compute while they communicate.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetu_fx.comm_ops.ops.batched_send_receive import BATCHED_SEND_RECEIVE
from hetu_fx.comm_ops.ops.dim_parts import ALL_GATHER, LOCAL_SLICE, REDUCE_SCATTER
from hetu_fx.comm_ops.ops.op import CommOp, FusedOp
from hetu_fx.comm_ops.ops.ring_attention import RING_ATTENTION, RING_ATTENTION_BACKWARD
from hetu_fx.comm_ops.ops.split_collectives import SPLIT_ALL_GATHER, SPLIT_ALL_REDUCE, SPLIT_REDUCE_SCATTER
from hetu_fx.comm_ops.ops.sums import ALL_REDUCE, IDENTITY

_MOVING = (
    IDENTITY,
    ALL_REDUCE,
    ALL_GATHER,
    REDUCE_SCATTER,
    LOCAL_SLICE,
    SPLIT_ALL_REDUCE,
    SPLIT_ALL_GATHER,
    SPLIT_REDUCE_SCATTER,
    BATCHED_SEND_RECEIVE,
)

_FUSED = (RING_ATTENTION, RING_ATTENTION_BACKWARD)

COMM_OPS: Mapping[str, CommOp] = {record.name: record for record in _MOVING}
FUSED_OPS: Mapping[str, FusedOp] = {record.name: record for record in _FUSED}
OPS: Mapping[str, CommOp | FusedOp] = {**COMM_OPS, **FUSED_OPS}
