"""A call of every op that has a rule: at least one, more where the arguments change what the rule says.

Sizes are 3, 4, 6 and the like, so that every factor can be cut evenly and unevenly.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations import moe  # noqa: F401 - registers transformers::grouped_mm_fallback

from hetu_fx.deduction.rules.build import full_name
from hetu_fx.deduction.rules.pointwise import BINARY, COPIES, OTHER_COPIES, UNARY, ZERO_AT_ZERO
from hetu_fx.transforms.rewrites import random_ops, row_ops, sequence_ops  # noqa: F401 - registers the ops of hetu::
from tests.deduction.shards import Sample, find_op, sample

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(1)


def x(*shape: int) -> torch.Tensor:
    """Numbers between 0.2 and 0.8, which every function is defined on, no two alike."""
    return torch.rand(shape, generator=GENERATOR, dtype=F64) * 0.6 + 0.2


def signed(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=F64)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=GENERATOR)


def flags(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=GENERATOR) > 0.5


NOT_DIFFERENTIABLE = {"aten.floor_divide.default", "aten.heaviside.default"}
INTEGER_OPS = ("bitwise", "__and__", "__or__", "__xor__")
EXTRA: dict[str, tuple[Any, ...]] = {
    "aten.to.dtype": (torch.float32,),
    "aten.to.device": (torch.device("cpu"), torch.float64),
    "aten.full_like.default": (3.0,),
    "aten.threshold.default": (0.5, 0.1),
    "aten.hardtanh.default": (0.3, 0.6),
    "aten.clamp.default": (0.3,),
    "aten.clip.default": (0.3,),
}


OF_COMPLEX = ("aten._conj.default", "aten.imag.default", "aten.real.default")


def unary(name: str) -> list[Sample]:
    if any(part in name for part in INTEGER_OPS):
        arguments = (ids(8, 3, 4),)
    elif name in OF_COMPLEX:
        return [sample(torch.complex(x(3, 4), x(3, 4)))]
    elif name == "aten.pow.Scalar":
        return [sample(0.7, x(3, 4))]
    elif name == "aten.empty_like.default":
        return [Sample((x(3, 4),), values=False)]
    elif name == "aten.floor_divide.Scalar":
        return [Sample((x(3, 4), 0.7), fixed=(0,))]
    else:
        arguments = (x(3, 4),)
    required = [a for a in find_op(name)._schema.arguments[1:] if not a.has_default_value() and not a.kwarg_only]
    extra = EXTRA.get(name, tuple(1 if "bitwise" in name or "__" in name else 0.7 for _ in required))
    return [sample(*arguments, *extra)]


def binary(name: str) -> list[Sample]:
    schema = find_op(name)._schema
    whole = any(part in name for part in INTEGER_OPS)
    shapes = [(3, 4), (4,), (3, 1)]
    tensors = [a for a in schema.arguments if str(a.type) == "Tensor"]
    made = [ids(8, *s) if whole else x(*s) for s in shapes[: len(tensors)]]
    if name == "aten.clamp.Tensor":
        return [sample(x(3, 4), x(4))]
    extra = [0.7] if name == "aten.lerp.Scalar" else []
    return [Sample((*made, *extra), fixed=(0, 1) if name in NOT_DIFFERENTIABLE else ())]


def pointwise_samples() -> dict[str, list[Sample]]:
    found = {
        full_name(op): unary(full_name(op)) for op in (*COPIES, *OTHER_COPIES, *ZERO_AT_ZERO, *UNARY, "reciprocal")
    }
    return found | {full_name(op): binary(full_name(op)) for op in BINARY}


ARITHMETIC = {
    "add.Tensor": [
        sample(x(3, 4), x(4)),
        sample(x(3, 4), 2.0),
        sample(x(3, 4), 0),
        sample(x(3, 4), x(3, 1), alpha=2),
    ],
    "sub.Tensor": [sample(x(3, 4), x(3, 4)), sample(x(3, 4), 1.0)],
    "mul.Tensor": [sample(x(3, 4), x(6, 1, 4)), sample(x(3, 4), 2.0)],
    "mul.Scalar": [sample(x(3, 4), 2.0)],
    "div.Tensor": [sample(x(3, 4), x(4)), sample(x(3, 4), 2.0)],
    "div.Scalar": [sample(x(3, 4), 2.0)],
    "div.Tensor_mode": [
        sample(x(3, 4), x(4), rounding_mode="floor"),
        sample(x(3, 4), x(4), rounding_mode=None),
    ],
    "true_divide.Tensor": [sample(x(3, 4), x(4))],
    "reciprocal": [sample(x(3, 4))],
    "glu": [sample(x(3, 8)), sample(x(6, 4), 0)],
    "prelu": [sample(x(3, 4, 5), x(4)), sample(x(3, 4), x(1)), sample(x(4), x(1))],
    "bucketize.Tensor": [sample(x(3, 4), torch.tensor([0.3, 0.5, 0.7], dtype=F64))],
    "subtract.Tensor": [sample(x(3, 4), x(3, 4))],
    "multiply.Tensor": [sample(x(3, 4), x(6, 1, 4))],
    "multiply.Scalar": [sample(x(3, 4), 2.0)],
    "divide.Tensor": [sample(x(3, 4), x(4))],
    "divide.Tensor_mode": [sample(x(3, 4), x(4), rounding_mode="floor")],
    "where.self": [sample(flags(3, 4), x(3, 1), x(4))],
    "where.ScalarOther": [sample(flags(3, 4), x(3, 4), 0.0), sample(flags(3, 4), x(3, 4), 1.0)],
    "where.ScalarSelf": [sample(flags(3, 4), 0.0, x(3, 4))],
    "where.Scalar": [sample(flags(3, 4), 1.0, 0.0)],
    "masked_fill.Scalar": [sample(x(3, 4), flags(4), 0.0), sample(x(3, 4), flags(3, 1), 7.0)],
    "masked_fill.Tensor": [sample(x(3, 4), flags(4), torch.tensor(1.0, dtype=F64))],
    "fill.Scalar": [sample(x(3, 4), 2.0)],
    "fill.Tensor": [sample(x(3, 4), torch.tensor(1.0, dtype=F64))],
    "to.other": [sample(x(3, 4), torch.zeros(5, 2))],
    "type_as": [sample(x(3, 4), torch.zeros(5, 2))],
}
MATMUL = {
    "linear": [sample(x(3, 4, 6), x(8, 6), x(8)), sample(x(3, 6), x(8, 6))],
    "mm": [sample(x(3, 4), x(4, 6))],
    "bmm": [sample(x(3, 4, 6), x(3, 6, 5))],
    "mv": [sample(x(3, 4), x(4))],
    "dot": [sample(x(6), x(6))],
    "vdot": [sample(x(6), x(6))],
    "outer": [sample(x(3), x(4))],
    "ger": [sample(x(3), x(4))],
    "bilinear": [sample(x(3, 4), x(3, 6), x(5, 4, 6), x(5))],
    "matmul": [
        *(sample(x(3, 4), x(4, 6)), sample(x(4), x(4, 6)), sample(x(3, 4), x(4)), sample(x(4), x(4))),
        *(sample(x(3, 5, 4), x(4, 6)), sample(x(2, 3, 5, 4), x(3, 4, 6)), sample(x(3, 5, 4), x(4))),
        *(sample(x(4), x(3, 4, 6)), sample(x(3, 1, 4), x(3, 4, 6)), sample(x(1, 5, 4), x(3, 4, 6))),
    ],
    "addmm": [sample(x(6), x(3, 4), x(4, 6)), sample(x(3, 1), x(3, 4), x(4, 6), beta=2)],
    "baddbmm": [sample(x(3, 4, 5), x(3, 4, 6), x(3, 6, 5)), sample(x(4, 5), x(3, 4, 6), x(3, 6, 5))],
    "cdist": [sample(x(2, 3, 4), x(2, 5, 4)), sample(x(3, 4), x(5, 4))],
    "addmv": [sample(x(3), x(3, 4), x(4))],
    "addbmm": [sample(x(3, 6), x(2, 3, 4), x(2, 4, 6)), sample(x(6), x(2, 3, 4), x(2, 4, 6), beta=2)],
    "addr": [sample(x(3, 4), x(3), x(4)), sample(x(4), x(3), x(4), alpha=2)],
    "inner": [sample(x(3, 4), x(5, 4)), sample(x(3, 4), x(4)), sample(x(3, 4), x())],
    "tensordot": [sample(x(3, 4, 5), x(5, 3, 6), [2, 0], [0, 1]), sample(x(3, 4), x(5), [], [])],
    "einsum": [
        sample("...k, kn -> ...n", [x(2, 3, 4), x(4, 6)]),
        sample("b...k, ...k", [x(3, 2, 4), x(2, 4)]),
        sample("bii -> bi", [x(3, 4, 4)]),
        sample("bhqd, bhkd -> bhqk", [x(2, 3, 4, 6), x(2, 3, 5, 6)]),
        sample("ij,jk", [x(3, 4), x(4, 6)]),
        sample("bi->b", [x(3, 4)]),
    ],
}
REDUCTION = {
    "sum": [sample(x(3, 4))],
    "sum.dim_IntList": [sample(x(3, 4, 6), [1]), sample(x(3, 4, 6), [0, -1], True)],
    "nansum": [sample(x(3, 4), [1])],
    "count_nonzero": [sample(ids(2, 3, 4), 1)],
    "count_nonzero.dim_IntList": [sample(ids(2, 3, 4), [0])],
    "mean": [sample(x(3, 4))],
    "mean.dim": [sample(x(3, 4, 6), [-1], True), sample(x(3, 4, 6), [0, 2])],
    "cumsum": [sample(x(3, 4), 1)],
    **{op: [sample(x(3, 4), 1)] for op in ("cumprod", "logcumsumexp", "cummax", "cummin")},
    **{op: [sample(x(3, 4))] for op in ("max", "min", "median", "prod", "std", "var")},
    **{op: [sample(flags(3, 4))] for op in ("any", "all")},
    **{op: [sample(x(3, 4), [1]), sample(x(3, 4), [0], True)] for op in ("amax", "amin", "logsumexp")},
    **{op: [sample(x(3, 4), 1), sample(x(3, 4), 0, True)] for op in ("max.dim", "min.dim", "median.dim", "mode")},
    **{op: [sample(x(3, 4), 1), sample(x(3, 4))] for op in ("argmax", "argmin")},
    **{op: [sample(flags(3, 4), 1), sample(flags(3, 4), 0, True)] for op in ("any.dim", "all.dim")},
    **{op: [sample(flags(3, 4), [1])] for op in ("any.dims", "all.dims")},
    **{op: [sample(x(3, 4), [1])] for op in ("std.dim", "var.dim")},
    **{op: [sample(x(3, 4), [1], correction=1)] for op in ("std.correction", "var.correction")},
    **{op: [sample(x(3, 4), [1], correction=1)] for op in ("var_mean.correction", "std_mean.correction")},
    **{op: [sample(x(3, 4), [1])] for op in ("var_mean.dim", "std_mean.dim")},
    "cosine_similarity": [sample(x(3, 4, 5), x(3, 4, 5)), sample(x(3, 4), x(4), -1), sample(x(3, 1, 4), x(6, 4), -1)],
    "aminmax": [sample(x(3, 4), dim=1)],
    "prod.dim_int": [sample(x(3, 4), 1)],
    "norm.Scalar": [sample(x(3, 4), 2)],
    "norm.ScalarOpt_dim": [sample(x(3, 4), 2, [1])],
    "linalg_vector_norm": [sample(x(3, 4), 2, [1]), sample(x(3, 4))],
    **{op: [sample(x(3, 4))] for op in ("var_mean", "std_mean", "nanmedian")},
    "nanmean": [sample(x(3, 4), [1]), sample(x(3, 4))],
    "nanmedian.dim": [sample(x(3, 4), 1)],
    "kthvalue": [sample(x(3, 4), 2, 1), sample(x(3, 4), 2, 0, True)],
    **{
        op: [sample(x(3, 4), torch.tensor([0.2, 0.7], dtype=F64), 1), sample(x(3, 4), torch.tensor(0.5, dtype=F64))]
        for op in ("quantile", "nanquantile")
    },
    **{op: [sample(x(3, 4), 0.3, 0, True), sample(x(3, 4), 0.5)] for op in ("quantile.scalar", "nanquantile.scalar")},
    "pairwise_distance": [sample(x(3, 4), x(3, 4)), sample(x(3, 4, 5), x(5), keepdim=True)],
    **{op: [sample(x(3, 4), dim=0), sample(x(3, 4))] for op in ("trapezoid.dx", "trapz.dx", "cumulative_trapezoid.dx")},
}
VIEW = {
    "view": [
        *(sample(x(3, 4, 6), [12, 6]), sample(x(12, 6), [3, 4, -1]), sample(x(3, 24), [3, 4, 6])),
        *(sample(x(4, 6), [6, 4]), sample(x(3, 4, 6), [-1]), sample(x(3, 1, 4), [3, 4, 1])),
    ],
    "reshape": [sample(x(3, 2, 4), [3, 8])],
    "_unsafe_view": [sample(x(3, 8), [3, 2, 4])],
    "view_copy": [sample(x(3, 8), [24])],
    "flatten.using_ints": [sample(x(3, 4, 6), 1)],
    "view_as": [sample(x(3, 8), x(3, 2, 4))],
    "reshape_as": [sample(x(3, 8), x(3, 2, 4))],
    "squeeze": [sample(x(3, 1, 4))],
    "squeeze.dim": [sample(x(3, 1, 4), 1)],
    "squeeze.dims": [sample(x(3, 1, 4, 1), [1, 3])],
    "unsqueeze": [sample(x(3, 4), 1)],
    "ravel": [sample(x(3, 4))],
    "unflatten.int": [sample(x(3, 12), 1, [2, -1]), sample(x(12, 3), 0, [3, 4])],
    "expand": [sample(x(3, 1, 4), [3, 5, -1]), sample(x(4), [3, 4])],
    "expand_as": [sample(x(3, 1), x(3, 4))],
    "broadcast_to": [sample(x(3, 1), [3, 4])],
    **{op: [sample(x(3, 4, 6), 0, -1)] for op in ("transpose.int", "swapaxes", "swapdims")},
    "t": [sample(x(3, 4)), sample(x(3))],
    "numpy_T": [sample(x(3, 4, 6))],
    "mT": [sample(x(3, 4, 6))],
    "adjoint": [sample(x(3, 4, 6))],
    "permute": [sample(x(3, 4, 6), [2, 0, -2])],
    **{op: [sample(x(3, 4, 6), [0], [-1])] for op in ("movedim.intlist", "moveaxis.intlist")},
    **{op: [sample(x(3, 4, 6), 0, -1)] for op in ("movedim.int", "moveaxis.int")},
    "channel_shuffle": [sample(x(3, 6, 5), 2), sample(x(3, 12, 5), 3)],
    "slice.Tensor": [sample(x(6, 4), 0, 1, 4), sample(x(6, 4), 0, 0, 9223372036854775807)],
    "narrow": [sample(x(6, 4), 0, 1, 3)],
    "select.int": [sample(x(3, 4, 6), 1, 2)],
    "unbind.int": [sample(x(3, 4), -1)],
    "split.Tensor": [sample(x(3, 12), 4, 1), sample(x(3, 10), 4, 1), sample(x(3, 4), 4, 1)],
    "split_with_sizes": [sample(x(3, 12), [4, 4, 4], -1), sample(x(3, 12), [6, 3, 3], -1)],
    "split.sizes": [sample(x(12, 3), [6, 6])],
    "chunk": [sample(x(3, 12), 3, -1)],
    "tensor_split.sections": [sample(x(3, 12), 3, -1)],
    "diff": [sample(x(3, 4)), sample(x(3, 4), 2, 0), sample(x(3, 4), 1, -1, x(3, 1), x(3, 2))],
    "cat": [
        *(sample([x(3, 4), x(3, 6)], 1), sample([x(3, 4)], 1), sample([x(0), x(3, 4)], -1)),
        sample([x(3, 1), x(3, 1)], -1),
    ],
    "concat": [sample([x(3, 4), x(3, 6)], 1)],
    "concatenate": [sample([x(3, 4), x(3, 6)], 1)],
    "stack": [sample([x(3, 4), x(3, 4)], 1)],
    "meshgrid": [sample([x(3), x(4)])],
    "meshgrid.indexing": [
        sample([x(3), x(), x(4)], indexing="ij"),
        sample([x(3), x(4), x(2)], indexing="xy"),
        sample([x(3)], indexing="xy"),
    ],
    "repeat": [sample(x(3, 1, 4), [2, 3, 4, 1])],
    "repeat_interleave.self_int": [sample(x(3, 4), 2, 1), sample(x(3, 4), 2), sample(x(), 3)],
    "pad": [sample(x(3, 4), [1, 2]), sample(x(3, 4), [0, 0, 1, 0], "constant", 2.0)],
    "constant_pad_nd": [sample(x(3, 4), [1, 2]), sample(x(3, 4), [-1, 1], 2.0)],
    "flip": [sample(x(3, 4), [1])],
    "roll": [sample(x(3, 4), [1], [1]), sample(x(3, 4), [2])],
    **{op: [sample(x(3, 4, 4))] for op in ("tril", "triu")},
    "linalg_diagonal": [sample(x(3, 4, 4)), sample(x(4, 3, 4), dim1=0, dim2=2)],
    "diag_embed": [sample(x(3, 4)), sample(x(3, 4, 5), 1, 0, 2)],
    "tile": [sample(x(3, 4), [2]), sample(x(3, 4), [2, 3, 1])],
    "mH": [sample(x(3, 4, 6))],
    **{op: [sample(x(3, 4, 5))] for op in ("fliplr", "flipud")},
    "rot90": [sample(x(3, 4, 5), 1, [0, 2])],
    "unsafe_split.Tensor": [sample(x(3, 12), 4, 1)],
    "unsafe_split_with_sizes": [sample(x(3, 12), [6, 3, 3], -1)],
    "unsafe_chunk": [sample(x(3, 12), 3, -1)],
    "hsplit.int": [sample(x(3, 6), 2), sample(x(6), 2)],
    "vsplit.int": [sample(x(6, 4), 2)],
    "dsplit.int": [sample(x(3, 4, 6), 2)],
    "tensor_split.indices": [sample(x(3, 6), [2, 3], 1)],
    "hsplit.array": [sample(x(3, 6), [2, 3])],
    "vsplit.array": [sample(x(6, 4), [2, 3])],
    "dsplit.array": [sample(x(3, 4, 6), [2])],
    "vstack": [sample([x(3, 4), x(2, 4)]), sample([x(4), x(4)])],
    **{op: [sample([x(3, 4), x(3, 2)])] for op in ("hstack", "column_stack")},
    "dstack": [sample([x(3, 4, 2), x(3, 4, 1)]), sample([x(3, 4), x(3, 4)])],
    "unfold": [sample(x(3, 8), 1, 4, 2)],
    "diagonal": [sample(x(3, 4, 4), 0, 1, 2)],
    "diagonal_scatter": [sample(x(3, 4, 4), x(3, 4), 0, 1, 2), sample(x(4, 3, 4), x(3, 3), 1, 0, 2)],
    "slice_scatter": [sample(x(6, 4), x(3, 4), 0, 1, 4), sample(x(6, 4), x(6, 4), 0)],
    "select_scatter": [sample(x(6, 4), x(6), 1, 2)],
    "view_as_complex": [sample(x(3, 4, 2))],
    "view_as_real": [sample(torch.complex(x(3, 4), x(3, 4)))],
}
NORMALIZATION = {
    **{op: [sample(x(3, 4, 6), -1)] for op in ("softmax.int", "log_softmax.int", "_safe_softmax")},
    **{op: [sample(x(3, 4, 6), -1, False)] for op in ("_softmax", "_log_softmax")},
    **{
        op: [sample(x(3, 4, 6), x(3, 4, 6), -1, F64)] for op in ("_softmax_backward_data", "_log_softmax_backward_data")
    },
    "layer_norm": [sample(x(3, 4, 6), [6], x(6), x(6)), sample(x(3, 4, 6), [4, 6])],
    "native_layer_norm": [sample(x(3, 4, 6), [6], x(6), x(6), 1e-5)],
    "native_layer_norm_backward": [
        *(
            Sample((x(3, 4, 6), x(3, 4, 6), [6], x(3, 4, 1), x(3, 4, 1), w, w, [True, False, False]), fixed=(2, 3))
            for w in (x(6), None)
        ),
        Sample((x(3, 4), x(3, 4), [4], x(3, 1), x(3, 1), x(4), x(4), [True, True, True]), fixed=(2, 3)),
    ],
    "_weight_norm": [sample(x(3, 4, 6), x(1, 1, 6), 2), sample(x(3, 4), x(3, 1))],
    "rms_norm": [sample(x(3, 4, 6), [6], x(6))],
    "_fused_rms_norm": [sample(x(3, 4, 6), [6], x(6), 1e-5)],
    "group_norm": [
        sample(x(3, 12, 5), 4, x(12), x(12)),
        sample(x(3, 4, 5), 1, x(4), x(4)),
        sample(x(3, 4, 5), 4),
    ],
    "batch_norm": [
        Sample((x(3, 4, 5), x(4), x(4), x(4), x(4), False, 0.1, 1e-5, False), fixed=(3, 4)),
        sample(x(3, 4, 5), x(4), x(4), None, None, True, 0.1, 1e-5, False),
    ],
    "native_batch_norm": [sample(x(3, 4, 5), x(4), x(4), None, None, True, 0.1, 1e-5)],
    "_native_batch_norm_legit": [Sample((x(3, 4, 5), x(4), x(4), x(4), x(4), True, 0.1, 1e-5), fixed=(3, 4))],
    "_native_batch_norm_legit_functional": [
        Sample((x(3, 4, 5), x(4), x(4), x(4), x(4), True, 0.1, 1e-5), fixed=(3, 4))
    ],
    "_batch_norm_with_update_functional": [Sample((x(3, 4, 5), x(4), x(4), x(4), x(4), 0.1, 1e-5), fixed=(3, 4))],
    "instance_norm": [sample(x(3, 4, 5), x(4), x(4), None, None, True, 0.1, 1e-5, False)],
}
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
PLACES, SEEN = torch.ops.hetu.sequence_places(DOCUMENTS), DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None]
ATTENTION = {
    "scaled_dot_product_attention": [
        sample(x(2, 3, 4, 6), x(2, 3, 5, 6), x(2, 3, 5, 8)),
        sample(x(2, 3, 4, 6), x(2, 3, 4, 6), x(2, 3, 4, 8), is_causal=True),
        sample(x(2, 3, 4, 6), x(2, 3, 5, 6), x(2, 3, 5, 8), flags(2, 1, 4, 5) | True),
        sample(x(2, 6, 4, 8), x(2, 3, 5, 8), x(2, 3, 5, 8), x(6, 4, 5), enable_gqa=True),
        sample(x(3, 4, 6), x(3, 5, 6), x(3, 5, 8)),
    ],
    "hetu.sequence_places.default": [sample(DOCUMENTS)],
    "hetu.sequence_attention.default": [
        sample(x(2, 3, 6, 4), x(2, 3, 6, 4), x(2, 3, 6, 8), None, PLACES, PLACES, True, None, False),
        sample(x(2, 6, 6, 4), x(2, 3, 6, 4), x(2, 3, 6, 8), None, PLACES, PLACES, False, 0.3, True),
        sample(x(2, 3, 6, 4), x(2, 3, 6, 4), x(2, 3, 6, 8), SEEN, PLACES, PLACES, False, None, False),
    ],
}
BAGS = torch.tensor([0, 4, 7])
LOOKUP = {
    "embedding": [sample(x(8, 6), ids(8, 3, 4)), sample(x(8, 6), ids(8, 3, 4), -1, True)],
    "embedding_bag": [sample(x(8, 6), ids(8, 9), BAGS)],
    "embedding_bag.padding_idx": [sample(x(8, 6), ids(8, 9), BAGS, False, 1, False, None, False, 2)],
    "index.Tensor": [
        *(sample(x(6, 4), [ids(6, 3)]), sample(x(3, 6, 4), [None, ids(6, 5)])),
        *(sample(x(3, 6, 4), [ids(3, 5, 1), None, ids(4, 2)]), sample(x(3, 6, 4), [ids(3, 5, 1), ids(6, 2)])),
        sample(x(6, 4), [flags(6)]),
    ],
    "_unsafe_index.Tensor": [sample(x(6, 4), [ids(6, 3)])],
    "index_put": [
        sample(x(6, 4), [ids(6, 3)], x(3, 4)),
        sample(x(6, 4), [ids(6, 3)], x(3, 4), True),
        sample(x(3, 4, 4), [None, torch.arange(4), torch.arange(4)], x(4)),
        sample(x(3, 4, 4), [None, torch.arange(4), torch.arange(4)], x(3, 4), True),
        sample(x(4, 3, 4), [torch.arange(4), None, torch.arange(4)], x(4, 3)),
        sample(x(3, 4, 6), [None, None, torch.arange(4)], x(3, 1, 4)),
    ],
    "_unsafe_index_put": [sample(x(6, 4), [ids(6, 3)], x(3, 4))],
    "gather": [sample(x(3, 4), 1, ids(4, 3, 6)), sample(x(6, 4), 1, ids(4, 3, 6))],
    "scatter.src": [sample(x(3, 6), 1, ids(6, 3, 4), x(3, 4))],
    "scatter.value": [sample(x(3, 6), 1, ids(6, 3, 4), 2.0)],
    "scatter_add": [sample(x(3, 6), 1, ids(6, 3, 4), x(3, 4))],
    "index_select": [sample(x(3, 6), 1, ids(6, 4))],
    "index_add": [sample(x(3, 6), 1, ids(6, 4), x(3, 4))],
    "one_hot": [sample(ids(5, 3, 4), 5)],
    "index_copy": [sample(x(3, 6), 1, torch.tensor([1, 4, 0]), x(3, 3))],
    "index_fill.int_Scalar": [sample(x(3, 6), 1, ids(6, 2), 0.5)],
    "index_fill.int_Tensor": [sample(x(3, 6), 1, ids(6, 2), torch.tensor(0.5, dtype=F64))],
    "index_reduce": [sample(x(3, 6), 1, ids(6, 4), x(3, 4), "amax")],
    "scatter.reduce": [Sample((x(3, 6), 1, ids(6, 3, 4), x(3, 4)), {"reduce": "add"}, fixed=(0, 2))],
    "scatter.value_reduce": [Sample((x(3, 6), 1, ids(6, 3, 4), 2.0), {"reduce": "multiply"}, fixed=(0,))],
    "scatter_reduce.two": [
        sample(x(3, 6), 1, ids(6, 3, 4), x(3, 4), "amax"),
        sample(x(4), 0, torch.tensor(2), x(), "prod"),
    ],
    "take_along_dim": [sample(x(3, 6), ids(6, 3, 4), 1), sample(x(1, 6), ids(6, 3, 4), 1), sample(x(3, 4), ids(12, 5))],
}
SCORES = [x(6, 4), x(3, 4, 5)]
LOSS = {
    "cross_entropy_loss": [
        *(sample(x(6, 4), ids(4, 6), None, reduction) for reduction in (0, 1, 2)),
        *(
            sample(x(3, 4, 5), ids(4, 3, 5)),
            Sample((x(6, 4), ids(4, 6), x(4), 2), fixed=(2,)),
            sample(x(6, 4), x(6, 4)),
        ),
        sample(x(6, 4), ids(4, 6), label_smoothing=0.1),
    ],
    "nll_loss": [*(sample(x(6, 4), ids(4, 6), None, reduction) for reduction in (0, 1, 2))],
    "nll_loss_nd": [sample(x(6, 4), ids(4, 6))],
    "nll_loss2d": [sample(x(3, 4, 5, 2), ids(4, 3, 5, 2))],
    **{
        op: [sample(x(3, 4), x(3, 4), reduction=r) for r in (0, 1, 2)]
        for op in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div")
    },
    **{
        op: [sample(x(3, 4) if r == 0 else x(), x(3, 4), x(3, 4), r, *more) for r in (0, 1, 2)]
        for op, more in (
            ("mse_loss_backward", ()),
            ("smooth_l1_loss_backward", (1.0,)),
            ("huber_loss_backward", (1.0,)),
        )
    },
    "binary_cross_entropy_backward": [
        Sample((x(3, 4) if r == 0 else x(), x(3, 4), x(3, 4), None, r), fixed=(2,)) for r in (0, 1, 2)
    ],
    "binary_cross_entropy_with_logits": [
        *(Sample((signed(3, 4), x(3, 4), None, x(4), r), fixed=(2,)) for r in (0, 1, 2)),
        Sample((signed(3, 4), x(3, 4), x(3, 4)), fixed=(2,)),
    ],
    "soft_margin_loss": [Sample((x(3, 4), x(3, 4)), fixed=(1,))],
    "hinge_embedding_loss": [sample(x(3, 4), signed(3, 4).sign(), 0.9, r) for r in (0, 1, 2)],
    "margin_ranking_loss": [
        *(sample(x(3, 4), x(3, 4), signed(3, 4).sign(), 0.5, r) for r in (0, 1, 2)),
        sample(x(3, 4), x(3, 1), signed(3, 4).sign(), 0.5, 1),
    ],
    "triplet_margin_loss": [
        *(sample(x(3, 4), x(3, 4), x(3, 4), 5.0, 2.0, 1e-6, r == 1, r) for r in (0, 1, 2)),
        sample(x(3, 4, 6), x(3, 1, 6), x(3, 4, 6), 5.0),
        sample(x(4), x(4), x(4), 5.0),
    ],
    "cosine_embedding_loss": [
        *(sample(signed(6, 4), signed(6, 4), signed(6).sign(), -0.5, r) for r in (0, 1, 2)),
        sample(signed(4), signed(4), torch.ones((), dtype=F64)),
    ],
    "multi_margin_loss": [
        *(sample(x(6, 4), ids(4, 6), 2, 1.0, None, r) for r in (0, 1, 2)),
        Sample((x(6, 4), ids(4, 6), 1, 1.0, x(4)), fixed=(2,)),
        sample(x(4), ids(4, 1)),
    ],
    "multilabel_margin_loss": [
        *(sample(x(3, 4), torch.tensor([[3, 0, -1, 1], [1, -1, 0, 2], [2, 1, 0, -1]]), r) for r in (0, 1, 2)),
        sample(x(4), torch.tensor([1, 3, -1, 0])),
    ],
    "poisson_nll_loss": [sample(x(3, 4), x(3, 4), True, False, 1e-8, r) for r in (0, 1, 2)],
}
CONVOLUTION = {
    "conv1d": [sample(x(3, 4, 7), x(6, 4, 3), x(6))],
    "conv2d": [
        *(
            sample(x(3, 4, 7, 7), x(6, 4, 3, 3), x(6), [2, 2], [1, 1]),
            sample(x(4, 7, 7), x(6, 4, 3, 3), x(6)),
        ),
        *(
            sample(x(3, 6, 7, 7), x(6, 1, 3, 3), x(6), [1, 1], [1, 1], [1, 1], 6),
            sample(x(3, 4, 5, 5), x(6, 4, 1, 1)),
        ),
        sample(x(3, 12, 7, 7), x(6, 4, 3, 3), x(6), [1, 1], [0, 0], [1, 1], 3),
    ],
    "conv3d": [sample(x(2, 4, 3, 3, 3), x(6, 4, 2, 2, 2), x(6))],
    "convolution": [
        sample(x(3, 4, 7), x(6, 4, 3), x(6), [1], [0], [1], False, [0], 1),
        sample(x(3, 4, 7), x(4, 6, 3), x(6), [1], [0], [1], True, [0], 1),
    ],
    "conv1d.padding": [sample(x(3, 4, 7), x(6, 4, 3), x(6), [1], "same")],
    "conv2d.padding": [sample(x(3, 4, 7, 7), x(6, 4, 3, 3), x(6), [1, 1], "same")],
    "conv3d.padding": [sample(x(2, 4, 3, 3, 3), x(6, 4, 2, 2, 2), x(6), [1, 1, 1], "valid")],
    "conv_transpose1d": [sample(x(3, 4, 7), x(4, 6, 3), x(6))],
    "conv_transpose2d.input": [
        sample(x(3, 4, 5, 5), x(4, 6, 3, 3), x(6), [2, 2]),
        sample(x(3, 6, 5, 5), x(6, 4, 3, 3), x(12), [1, 1], [0, 0], [0, 0], 3),
    ],
    "conv_transpose3d.input": [sample(x(2, 4, 3, 3, 3), x(4, 6, 2, 2, 2), x(6))],
    "adaptive_max_pool1d": [sample(x(3, 4, 6), [2])],
    "adaptive_max_pool3d": [sample(x(3, 4, 6, 6, 6), [2, 2, 2])],
    **{op: [sample(x(3, 4, 5, 5), x(3, 6, 4, 2), 0, 0, False)] for op in ("grid_sampler", "grid_sampler_2d")},
    "grid_sampler_3d": [sample(x(3, 4, 3, 3, 3), x(3, 2, 4, 6, 3), 0, 0, False)],
    "max_pool1d": [sample(x(3, 4, 6), [2])],
    "max_pool2d": [sample(x(3, 4, 6, 6), [2, 2])],
    "max_pool3d": [sample(x(3, 4, 6, 6, 6), [2, 2, 2])],
    "max_pool2d_with_indices": [sample(x(3, 4, 6, 6), [2, 2])],
    "adaptive_max_pool2d": [sample(x(3, 4, 6, 6), [2, 2])],
    "avg_pool1d": [sample(x(3, 4, 6), [2])],
    "avg_pool2d": [sample(x(3, 4, 6, 6), [2, 2])],
    "avg_pool3d": [sample(x(3, 4, 6, 6, 6), [2, 2, 2])],
    "adaptive_avg_pool1d": [sample(x(3, 4, 6), [2])],
    "adaptive_avg_pool2d": [sample(x(3, 4, 6, 6), [1, 1]), sample(x(4, 6, 6), [2, 2])],
    "adaptive_avg_pool3d": [sample(x(3, 4, 6, 6, 6), [2, 2, 2])],
    "upsample_nearest2d": [sample(x(3, 4, 3, 3), [6, 6])],
    "upsample_nearest2d.vec": [sample(x(3, 4, 3, 3), None, [2.0, 2.0])],
    "upsample_bilinear2d": [sample(x(3, 4, 3, 3), [6, 6], False)],
    "upsample_bilinear2d.vec": [sample(x(3, 4, 3, 3), [6, 6], False, None)],
    "upsample_bicubic2d": [sample(x(3, 4, 3, 3), [6, 6], False)],
    "upsample_bicubic2d.vec": [sample(x(3, 4, 3, 3), [6, 6], False, None)],
    "pixel_shuffle": [sample(x(3, 8, 4, 4), 2)],
    "pixel_unshuffle": [sample(x(3, 2, 4, 4), 2)],
    "upsample_nearest1d": [sample(x(3, 4, 3), [6])],
    "upsample_nearest1d.vec": [sample(x(3, 4, 3), None, [2.0])],
    "upsample_linear1d": [sample(x(3, 4, 3), [6], False)],
    "upsample_linear1d.vec": [sample(x(3, 4, 3), [6], False, None)],
    "upsample_nearest3d": [sample(x(3, 4, 2, 2, 2), [4, 4, 4])],
    "upsample_nearest3d.vec": [sample(x(3, 4, 2, 2, 2), None, [2.0, 2.0, 2.0])],
    "upsample_trilinear3d": [sample(x(3, 4, 2, 2, 2), [4, 4, 4], False)],
    "upsample_trilinear3d.vec": [sample(x(3, 4, 2, 2, 2), [4, 4, 4], False, None)],
    "_upsample_bilinear2d_aa": [sample(x(3, 4, 3, 3), [6, 6], False)],
    "_upsample_bilinear2d_aa.vec": [sample(x(3, 4, 3, 3), [6, 6], False, None)],
    "_upsample_bicubic2d_aa.vec": [sample(x(3, 4, 3, 3), [6, 6], False, None)],
    "reflection_pad1d": [sample(x(3, 4, 5), [1, 1])],
    "reflection_pad2d": [sample(x(3, 4, 5, 5), [1, 1, 2, 0])],
    "replication_pad1d": [sample(x(3, 4, 5), [1, 1])],
    "replication_pad2d": [sample(x(3, 4, 5, 5), [1, 1, 2, 0])],
    "replication_pad3d": [sample(x(3, 4, 3, 3, 3), [1, 1, 1, 1, 1, 1])],
    "im2col": [
        sample(x(3, 4, 6, 5), [3, 1], [1, 1], [1, 0], [1, 1]),
        sample(x(4, 6, 5), [2, 2], [1, 1], [0, 0], [1, 1]),
    ],
    "col2im": [sample(x(3, 8, 15), [4, 5], [2, 1], [1, 1], [0, 0], [1, 1])],
}
SPECTRAL = {
    **{
        op: [sample(x(3, 4, 6)), sample(x(3, 4, 6), None, 1)] for op in ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft")
    },
    **{op: [sample(x(3, 4, 6))] for op in ("fft_hfft", "fft_ihfft")},
    **{
        op: [sample(x(3, 4, 6)), sample(x(3, 4, 6), None, [0, 1])]
        for op in ("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2")
    },
    **{
        op: [sample(x(3, 4, 6)), sample(x(3, 4, 6), None, [0, 2])]
        for op in ("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn")
    },
    **{op: [sample(x(3, 4, 6), [1])] for op in ("fft_fftshift", "fft_ifftshift")},
    "stft": [Sample((x(3, 16), 8, 4, 8, x(8)), {"return_complex": True}, fixed=(1,))],
    "stft.center": [Sample((x(3, 16), 8, 4, 8, x(8)), {"return_complex": False}, fixed=(1,))],
    "istft": [Sample((torch.stft(x(3, 16), 8, 4, window=x(8), return_complex=True), 8, 4, 8, x(8)), fixed=(1,))],
}
RANDOM = {
    "dropout": [sample(x(3, 4), 0.5, False), Sample((x(3, 4), 0.5, True), values=False)],
    "native_dropout": [sample(x(3, 4), 0.5, False)],
    **{op: [sample(x(3, 4), 0.5, False)] for op in ("alpha_dropout", "feature_dropout", "feature_alpha_dropout")},
    **{op: [Sample((x(3, 4),), values=False)] for op in ("rand_like", "randn_like", "bernoulli")},
    "bernoulli.p": [Sample((x(3, 4), 0.5), values=False)],
    **{op: [Sample(([3, 4],), values=False)] for op in ("rand", "randn")},
    "hetu.uniform.default": [Sample((x(3, 4), torch.tensor([1, 0, 0]), 0, [], []), values=False)],
    "hetu.dropout.default": [Sample((x(3, 4), 0.5, torch.tensor([1, 0, 0]), 0, [], []), values=False)],
}
# Where rows begin differs by device, so their values have tests of their own (test_row_ops).
ALL_ROWS = {
    "_local_scalar_dense": [Sample((torch.tensor(2.0),), values=False)],
    "hetu.place_rows.default": [
        Sample((x(3, 4), torch.tensor([1, 0, 2]), 6, 0, 1, 1), values=False),
        Sample((x(4, 30), torch.tensor([1, 0, 2]), 6, 1, 2, 5), values=False),
    ],
    "hetu.own_rows.default": [
        Sample((x(6, 4), torch.tensor([1, 0, 2]), 3, 0, 1, 1), values=False),
        Sample((x(4, 60), torch.tensor([1, 0, 2]), 3, 1, 2, 5), values=False),
    ],
}
POSITIVE = x(3, 4, 4) @ x(3, 4, 4).mT + torch.eye(4, dtype=F64)
LOWER = torch.linalg.cholesky(POSITIVE)
FACTORED, PIVOTS = torch.linalg.lu_factor(POSITIVE)
REFLECTED = torch.geqrf(x(3, 4, 3))
INVERTED = """
    linalg_inv inverse matrix_exp linalg_matrix_exp linalg_cholesky cholesky pinverse
    linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor linalg_inv_ex linalg_cholesky_ex linalg_det det logdet
    linalg_slogdet slogdet linalg_cond linalg_svdvals linalg_eigvalsh linalg_eigh linalg_svd svd linalg_qr linalg_lu
    linalg_lu_factor linalg_lu_factor_ex
""".split()
# Complex results, and factors whose signs are free, have no gradients that can be compared.
LINALG = {
    **{op: [sample(POSITIVE)] for op in INVERTED},
    **{op: [Sample((POSITIVE,), values=False)] for op in ("linalg_eig", "linalg_eigvals")},
    "linalg_pinv": [sample(POSITIVE, 1e-8)],
    "cholesky_inverse": [sample(LOWER)],
    "linalg_pinv.rcond_tensor": [Sample((POSITIVE, torch.tensor(1e-8, dtype=F64)), fixed=(1,))],
    **{op: [sample(x(3, 4, 4), 3)] for op in ("linalg_matrix_power", "matrix_power")},
    "linalg_householder_product": [sample(*REFLECTED)],
    "linalg_solve_triangular": [sample(LOWER, x(3, 4, 2), upper=False), sample(LOWER[0], x(3, 4, 2), upper=False)],
    "cholesky_solve": [sample(x(3, 4, 2), LOWER)],
    "linalg_lu_solve": [Sample((FACTORED, PIVOTS, x(3, 4, 2)))],
    "lu_solve": [Sample((x(3, 4, 2), FACTORED, PIVOTS))],
    "linalg_solve": [sample(POSITIVE, x(3, 4, 2)), sample(POSITIVE, x(3, 4)), sample(POSITIVE[0], x(4))],
    "linalg_solve_ex": [sample(POSITIVE, x(3, 4, 2))],
    "cross": [sample(x(3, 4), x(3, 4)), sample(x(4, 3, 5), x(4, 3, 5), 1)],
    "linalg_cross": [sample(x(4, 3), x(4, 3)), sample(x(3, 1, 4), x(3, 5, 4), dim=0)],
    "linalg_vecdot": [sample(x(3, 4), x(3, 4)), sample(x(3, 4, 5), x(4, 5), dim=1)],
    "linalg_norm": [sample(x(3, 4)), sample(x(3, 4, 5), 2, [1])],
    "linalg_norm.ord_str": [sample(x(3, 4), "fro", [0, 1])],
    "linalg_matrix_norm": [sample(x(3, 4, 5), 1)],
    "linalg_matrix_norm.str_ord": [sample(x(3, 4, 5))],
    "renorm": [sample(x(3, 4, 5), 2, 1, 0.5)],
    "trace": [sample(x(4, 4))],
}
GATES = [x(12, 5), x(12, 4), x(12), x(12)]
RECURRENT = {
    "gru.input": [
        sample(x(3, 6, 5), x(1, 6, 4), GATES, True, 1, 0.0, True, False, False),
        sample(x(6, 3, 5), x(1, 6, 4), GATES, True, 1, 0.0, True, False, True),
    ],
    "lstm.input": [
        sample(
            x(6, 3, 5), [x(1, 6, 3), x(1, 6, 3)], [x(12, 5), x(12, 3), x(12), x(12)], True, 1, 0.0, True, False, True
        )
    ],
    **{
        op: [sample(x(3, 6, 5), x(1, 6, 4), [x(4, 5), x(4, 4)], False, 1, 0.0, True, False, False)]
        for op in ("rnn_tanh.input", "rnn_relu.input")
    },
    "gru_cell": [sample(x(6, 5), x(6, 4), *GATES), sample(x(6, 5), x(6, 4), *GATES[:2])],
    "lstm_cell": [sample(x(6, 5), [x(6, 3), x(6, 3)], x(12, 5), x(12, 3), x(12), x(12))],
    **{op: [sample(x(6, 5), x(6, 4), x(4, 5), x(4, 4))] for op in ("rnn_tanh_cell", "rnn_relu_cell")},
}
OFFSETS = torch.tensor([2, 3, 6], dtype=torch.int32)
ROUTING = {
    "sort": [sample(x(3, 4)), sample(x(3, 4), 0)],
    "sort.stable": [sample(x(3, 4), stable=True)],
    "argsort": [sample(x(3, 4))],
    "argsort.stable": [sample(x(3, 4), stable=True)],
    "topk": [sample(x(3, 6), 2)],
    "_grouped_mm": [
        Sample((x(6, 12).float(), x(3, 12, 24).float(), OFFSETS), unit=4),
        Sample((x(8, 12, 12).float(), x(8, 12, 24).float()), unit=4),
    ],
    "transformers.grouped_mm_fallback.default": [
        Sample((x(6, 12).float(), x(3, 12, 24).float(), OFFSETS), unit=4),
    ],
    "histc": [sample(ids(5, 6, 4).double(), 5, 0, 4), sample(x(6, 4), 5)],
}
CREATION = {
    "zeros": [sample([3, 4])],
    "ones": [sample([3, 4])],
    "empty.memory_format": [Sample(([3, 4],), values=False)],
    "full": [sample([3, 4], 2.0)],
    "new_zeros": [sample(x(2), [3, 4])],
    "new_ones": [sample(x(2), [3, 4])],
    "new_full": [sample(x(2), [3, 4], 2.0)],
    "new_empty": [Sample((x(2), [3, 4]), values=False)],
    "arange": [sample(6)],
    "arange.start": [sample(1, 6)],
    "arange.start_step": [sample(1, 6, 2)],
    "linspace": [sample(0.0, 1.0, 6)],
    "eye": [sample(4)],
    "eye.m": [sample(4, 3)],
    "hann_window": [sample(6)],
    "scalar_tensor": [sample(2.0)],
}
FAMILIES = (
    ARITHMETIC,
    MATMUL,
    REDUCTION,
    VIEW,
    NORMALIZATION,
    ATTENTION,
    LOOKUP,
    LOSS,
    CONVOLUTION,
    SPECTRAL,
    RECURRENT,
    LINALG,
    RANDOM,
    ALL_ROWS,
    ROUTING,
)
SAMPLES: dict[str, list[Sample]] = pointwise_samples() | {
    full_name(op): calls for family in (*FAMILIES, CREATION) for op, calls in family.items()
}
