"""Communication: the ops, and the one resolver that picks them.

`OPS` is the table of records, by name; importing it registers them all with torch as `hetu::name`. Those of one tensor,
which the resolver picks from, are `COMM_OPS`; the others compute while they communicate.
"""

from __future__ import annotations

from collections.abc import Mapping

from hetu_fx.comm_ops.ops.all_gather import ALL_GATHER
from hetu_fx.comm_ops.ops.all_reduce import ALL_REDUCE
from hetu_fx.comm_ops.ops.batched_send_receive import BATCHED_SEND_RECEIVE
from hetu_fx.comm_ops.ops.identity import IDENTITY
from hetu_fx.comm_ops.ops.local_slice import LOCAL_SLICE
from hetu_fx.comm_ops.ops.op import CommOp, FusedOp
from hetu_fx.comm_ops.ops.reduce_scatter import REDUCE_SCATTER
from hetu_fx.comm_ops.ops.ring_attention import RING_ATTENTION, RING_ATTENTION_BACKWARD
from hetu_fx.comm_ops.ops.split_all_gather import SPLIT_ALL_GATHER
from hetu_fx.comm_ops.ops.split_all_reduce import SPLIT_ALL_REDUCE
from hetu_fx.comm_ops.ops.split_reduce_scatter import SPLIT_REDUCE_SCATTER

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
