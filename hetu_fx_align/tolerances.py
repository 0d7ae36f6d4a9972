"""How far an op's result may be from the up-cast reference: by dtype, and by class of op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetu_fx.base.dtypes import carries_gradient
from hetu_fx.base.torch_private import OpOverload, short_name

BASE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-8,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 4e-3,
}
"""Relative errors, of a tensor's norm. For float64 and float32 DiTorch's (rtol and atol of its auto-compare). DiTorch
has 1e-4 and 1e-3 for float16 and bfloat16, relative and absolute, where one rounding alone makes up to 5e-4 and 2e-3:
here two roundings are allowed, relative to the norm alone, so that small tensors are judged like large ones."""

OTHER_BASE = 1e-3
"""For dtypes that are not in the table, as DiTorch has it."""


@dataclass(frozen=True, slots=True)
class OpClass:
    """Ops that are as exact as each other.

    Attributes:
        name: of the class.
        forward: how many times the dtype's tolerance is allowed in results; 0: they must be equal.
        backward: the same for gradients.
        why: what the numbers stand for.
        ops: names without namespace and overload.
    """

    name: str
    forward: float
    backward: float
    why: str
    ops: frozenset[str] = frozenset()


def _class(name: str, forward: float, backward: float, why: str, ops: str) -> OpClass:
    return OpClass(name, forward, backward, why, frozenset(ops.split()))


MOVE = _class(
    "move", 0, 1, "copies numbers; gradients of what is read several times are summed",
    "view reshape _unsafe_view view_as reshape_as flatten unflatten transpose permute movedim t numpy_T mT expand "
    "expand_as squeeze unsqueeze slice select narrow diagonal unfold split split_with_sizes chunk tensor_split unbind "
    "cat stack hstack concat clone contiguous alias detach detach_copy lift_fresh_copy flip roll repeat "
    "repeat_interleave tril triu as_strided relu neg abs maximum minimum pixel_shuffle pixel_unshuffle channel_shuffle "
    "max_pool1d max_pool2d max_pool3d select_scatter slice_scatter one_hot",
)  # fmt: skip
PICK = _class(
    "pick", 0, 4, "copies numbers by index; the backward adds up in the dtype, one after another",
    "index index_select gather take embedding take_along_dim masked_select",
)  # fmt: skip
SCATTER = _class(
    "scatter", 4, 1, "adds up by index in the dtype, one after another",
    "scatter_add index_add index_put scatter scatter_reduce index_copy scatter_src",
)  # fmt: skip
LOGIC = _class(
    "logic", 0, 0, "truth values and whole numbers",
    "eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor "
    "__and__ __or__ isin isnan isinf any all bucketize searchsorted nonzero bincount sign floor ceil round trunc",
)  # fmt: skip
ORDER = _class(
    "order", 0, 1, "numbers in order; which of two equal ones comes first is not said, so places are not compared",
    "topk sort argsort argmax argmin max min amax amin kthvalue median",
)  # fmt: skip
PRODUCT = _class(
    "product", 1, 1, "sums of products, in float32 or wider, rounded once",
    "linear matmul mm bmm addmm baddbmm addbmm mv dot einsum bilinear conv1d conv2d conv3d convolution "
    "conv_transpose1d conv_transpose2d conv_transpose3d _grouped_mm _convolution",
)  # fmt: skip
ATTENTION = _class(
    "attention", 2, 2, "two products with a softmax between them, whose weights are rounded",
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
NORM = _class(
    "norm", 1, 2, "differences from a mean; the backward takes differences of sums",
    "layer_norm native_layer_norm batch_norm group_norm instance_norm rms_norm native_group_norm "
    "_native_batch_norm_legit_functional normalize",
)  # fmt: skip
REDUCTION = _class(
    "reduction", 1, 1, "sums in float32 or wider, rounded once",
    "sum mean var var_mean std norm linalg_vector_norm logsumexp softmax log_softmax cumsum prod cross_entropy_loss "
    "nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits cosine_similarity avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
    "_softmax _log_softmax ctc_loss _ctc_loss",
)  # fmt: skip
UNSET = _class(
    "unset", 0, 0, "memory without values, which are not compared", "empty empty_like empty_strided new_empty",
)  # fmt: skip
POINTWISE = OpClass("pointwise", 1, 1, "element by element, rounded once; also ops that no other class names")

CLASSES = (MOVE, PICK, SCATTER, LOGIC, ORDER, PRODUCT, ATTENTION, NORM, REDUCTION, UNSET, POINTWISE)
_BY_OP = {op: kind for kind in CLASSES for op in kind.ops}


def class_of(op: OpOverload) -> OpClass:
    """Return the class of an op; pointwise where no other names it."""
    return _BY_OP.get(short_name(op), POINTWISE)


def is_compared(op: OpOverload, result: Tensor) -> bool:
    """Tell whether a result says something: values of memory that is not set, and places in an order, do not."""
    kind = class_of(op)
    return kind is not UNSET and (kind is not ORDER or carries_gradient(result.dtype))


def allowed(kind: OpClass, dtype: torch.dtype, *, backward: bool) -> float:
    """Return the relative error that a class of ops may have in a dtype."""
    return (kind.backward if backward else kind.forward) * BASE.get(dtype, OTHER_BASE)
