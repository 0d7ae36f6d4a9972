"""Write what runs to a folder (`write`), and run it elsewhere (`load`)."""

FORMAT = "hetu_fx.export/3"
OPS = (
    "hetu_fx.comm_ops.ops.table",
    "hetu_fx.transforms.rewrites.random_ops",
    "hetu_fx.transforms.rewrites.sequence_ops",
)
"""The modules that make known the ops which device graphs call."""
