"""x-transformers: decoders and encoders of two layers, one option each, and the wrappers around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from x_transformers import (
    ContinuousTransformerWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)

from benchmarks.families.batches import CLASSES, VOCABULARY, Batch, words
from benchmarks.families.family import Family
from benchmarks.zoo.objectives import cross_entropy, images_of, of_library, squared_error

Options = dict[str, Any]

LAYERS: Options = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}
LONGEST, CHANNELS = 32, 6

IN_LAYERS: Mapping[str, Options] = {
    "decoder": {},
    "rotary_pos_emb": {"rotary_pos_emb": True},
    "rotary_xpos": {"rotary_xpos": True},
    "alibi_pos_bias": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "rel_pos_bias": {"rel_pos_bias": True},
    "use_scalenorm": {"use_scalenorm": True},
    "use_rmsnorm": {"use_rmsnorm": True},
    "use_simple_rmsnorm": {"use_simple_rmsnorm": True},
    "ff_glu": {"ff_glu": True},
    "ff_swish": {"ff_swish": True, "ff_glu": True},
    "ff_relu_squared": {"ff_relu_squared": True},
    "ff_post_act_ln": {"ff_post_act_ln": True},
    "attn_num_mem_kv": {"attn_num_mem_kv": 2},
    "attn_talking_heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "attn_qk_norm": {"attn_qk_norm": True},
    "attn_kv_heads": {"attn_kv_heads": 1},
    "attn_one_kv_head": {"attn_one_kv_head": True},
    "attn_sparse_topk": {"attn_sparse_topk": 3},
    "attn_on_attn": {"attn_on_attn": True},
    "attn_gate_values": {"attn_gate_values": True},
    "attn_head_scale": {"attn_head_scale": True},
    "attn_flash": {"attn_flash": True},
    "attn_softclamp_logits": {"attn_softclamp_logits": True},
    "attn_laser": {"attn_laser": True},
    "add_value_residual": {"add_value_residual": True},
    "gate_residual": {"gate_residual": True},
    "scale_residual": {"scale_residual": True},
    "residual_attn": {"residual_attn": True},
    "macaron": {"macaron": True},
    "sandwich_coef": {"sandwich_coef": 1},
    "sandwich_norm": {"sandwich_norm": True},
    "shift_tokens": {"shift_tokens": 1},
    "zero_init_branch_output": {"zero_init_branch_output": True},
    "num_residual_streams": {"num_residual_streams": 2},
}
IN_WRAPPER: Mapping[str, Options] = {
    "tie_embedding": {"tie_embedding": True},
    "num_memory_tokens": {"num_memory_tokens": 2},
    "post_emb_norm": {"post_emb_norm": True},
    "emb_frac_gradient": {"emb_frac_gradient": 0.1},
    "scaled_sinu_pos_emb": {"scaled_sinu_pos_emb": True},
    "use_abs_pos_emb": {"use_abs_pos_emb": False},
    "mixture_of_softmax": {"mixture_of_softmax": True, "mixture_of_softmax_k": 2},
}


def _texts(layers: Options, wrapper: Options) -> nn.Module:
    made: nn.Module = TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=LONGEST, attn_layers=Decoder(**LAYERS, **layers), **wrapper
    )
    return made


def _masked() -> nn.Module:
    made: nn.Module = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LONGEST, attn_layers=Encoder(**LAYERS))
    return made


def _images() -> nn.Module:
    made: nn.Module = ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=CLASSES, attn_layers=Encoder(**LAYERS)
    )
    return made


def _signals() -> nn.Module:
    made: nn.Module = ContinuousTransformerWrapper(
        dim_in=CHANNELS, dim_out=CHANNELS, max_seq_len=LONGEST, attn_layers=Encoder(**LAYERS)
    )
    return made


class Translator(nn.Module):
    """An encoder and a decoder, which have their own loss."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            f"{side}_{name}": value
            for side in ("enc", "dec")
            for name, value in {"depth": 1, "heads": 2, "num_tokens": VOCABULARY, "max_seq_len": LONGEST}.items()
        }
        self.net = XTransformer(dim=16, **sizes)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Give the loss of the target, shifted."""
        loss: Tensor = self.net(src, tgt)
        return loss


def _next_words(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), target)


def _words(rows: int, length: int) -> Batch:
    return {"x": words(rows, length), "target": words(rows, length)}


def _signal(rows: int, length: int) -> Batch:
    return {"x": torch.randn(rows, length, CHANNELS), "target": torch.randn(rows, length, CHANNELS)}


def _pairs(rows: int, length: int) -> Batch:
    return {"src": words(rows, length), "tgt": words(rows, length)}


TEXTS: Mapping[str, Callable[[], nn.Module]] = {
    **{name: partial(_texts, options, {}) for name, options in IN_LAYERS.items()},
    **{name: partial(_texts, {}, options) for name, options in IN_WRAPPER.items()},
    "encoder": _masked,
}
FAMILIES: list[Family] = [
    *of_library("x-transformers", TEXTS, _next_words, _words),
    *of_library("x-transformers", {"images": _images}, cross_entropy, images_of(32, "img")),
    *of_library("x-transformers", {"signals": _signals}, squared_error, _signal),
    *of_library("x-transformers", {"translator": Translator}, None, _pairs),
]
