"""Our ops, made known by importing this: right after torch's reader of `.pt2`, for which they are needed, is there.

So `import hetu_fx`, which imports no torch, is all that device graphs need.
"""

from __future__ import annotations

import hetu_fx.comm_ops.ops.table
import hetu_fx.transforms.rewrites.random_ops
import hetu_fx.transforms.rewrites.sequence_ops  # noqa: F401
