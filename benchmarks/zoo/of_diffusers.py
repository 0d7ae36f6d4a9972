"""diffusers: its denoisers and autoencoders in tiny configurations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from benchmarks.families.batches import Batch, MakeBatch, classes
from benchmarks.families.family import Family
from benchmarks.zoo.objectives import of_library, squared_error

Options = dict[str, Any]

GROUPS: Options = {"norm_num_groups": 4}
UNET: Options = GROUPS | {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "attention_head_dim": 4,
}
CODER: Options = GROUPS | {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "latent_channels": 4,
    "sample_size": 16,
}
DIT: Options = {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "sample_size": 8, "patch_size": 2}
HEADS: Options = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
TEXT, TOKENS = 16, 5  # width and length of what describes an image

DENOISERS: Mapping[str, Options] = {
    "UNet2DModel": UNET
    | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
    "UNet2DModel resnet": UNET
    | {
        "down_block_types": ("ResnetDownsampleBlock2D", "ResnetDownsampleBlock2D"),
        "up_block_types": ("ResnetUpsampleBlock2D", "ResnetUpsampleBlock2D"),
        "resnet_time_scale_shift": "scale_shift",
    },
    "UNet2DModel skip": {
        "sample_size": 16,
        "block_out_channels": (32, 32),
        "layers_per_block": 1,
        "attention_head_dim": 8,
        "down_block_types": ("SkipDownBlock2D", "AttnSkipDownBlock2D"),
        "up_block_types": ("AttnSkipUpBlock2D", "SkipUpBlock2D"),
    },
}
CONDITIONAL: Mapping[str, Options] = {
    "UNet2DConditionModel": UNET
    | {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": TEXT,
        "in_channels": 3,
        "out_channels": 3,
    },
}
LATENT: Mapping[str, Options] = {
    "PixArtTransformer2DModel": DIT
    | {
        "in_channels": 3,
        "out_channels": 3,
        "cross_attention_dim": 16,
        "caption_channels": TEXT,
        "norm_type": "ada_norm_single",
    },
    "SanaTransformer2DModel": HEADS
    | {
        "in_channels": 3,
        "out_channels": 3,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 8,
        "cross_attention_dim": 16,
        "caption_channels": TEXT,
        "sample_size": 8,
    },
    "AuraFlowTransformer2DModel": {
        "sample_size": 8,
        "in_channels": 3,
        "out_channels": 3,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT,
        "caption_projection_dim": 16,
        "pos_embed_max_size": 64,
    },
}
POOLED: Mapping[str, Options] = {
    "SD3Transformer2DModel": DIT
    | {
        "in_channels": 3,
        "out_channels": 3,
        "joint_attention_dim": TEXT,
        "caption_projection_dim": 16,
        "pooled_projection_dim": TEXT,
        "pos_embed_max_size": 8,
    },
}
CLASSED: Mapping[str, Options] = {
    "DiTTransformer2DModel": DIT
    | {"in_channels": 3, "out_channels": 3, "num_embeds_ada_norm": 1000, "norm_num_groups": 1},
}
CODERS: Mapping[str, Options] = {
    "AutoencoderKL": CODER
    | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
    "VQModel": {key: value for key, value in CODER.items() if key != "latent_channels"}
    | {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": 4,
        "num_vq_embeddings": 16,
    },
    "AsymmetricAutoencoderKL": {
        "norm_num_groups": 4,
        "down_block_out_channels": (8, 16),
        "up_block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    },
    "AutoencoderDC": {
        "in_channels": 3,
        "latent_channels": 4,
        "attention_head_dim": 4,
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), (5,)),
        "decoder_qkv_multiscales": ((), (5,)),
        "upsample_block_type": "interpolate",
        "downsample_block_type": "stride_conv",
        "decoder_norm_types": "rms_norm",
        "decoder_act_fns": "silu",
    },
}
VIDEOS: Mapping[str, Options] = {
    "CogVideoXTransformer3DModel": HEADS
    | {
        "in_channels": 3,
        "out_channels": 3,
        "time_embed_dim": 4,
        "text_embed_dim": TEXT,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 5,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": TOKENS,
    },
}
EMBEDDINGS: Mapping[str, Options] = {
    "PriorTransformer": {
        "num_attention_heads": 2,
        "attention_head_dim": 4,
        "num_layers": 1,
        "embedding_dim": TEXT,
        "num_embeddings": TOKENS,
        "additional_embeddings": 4,
    },
}
SOUNDS: Mapping[str, Options] = {
    "UNet1DModel": {
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "block_out_channels": (32, 32),
        "extra_in_channels": 64,
        "down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D"),
        "up_block_types": ("AttnUpBlock1D", "UpBlock1DNoSkip"),
    },
}


IMAGE, FRAMES = 8, 2  # of a latent, of a video


def _trained_on(batch: MakeBatch, nets: Mapping[str, Options]) -> list[Family]:
    made = {name: partial(_made, name, options) for name, options in nets.items()}
    return of_library("diffusers", made, squared_error, batch)


def _made(name: str, options: Options) -> nn.Module:
    made: nn.Module = getattr(diffusers, name.partition(" ")[0])(**options)
    return made


def _to_itself(name: str, *shape: int) -> Batch:
    """Make values, by this name, and those of the same shape that they should become."""
    return {name: torch.randn(shape), "target": torch.randn(shape)}


def _coded(rows: int, length: int) -> Batch:
    return _to_itself("sample", rows, 3, 16, 16)


def _denoised(rows: int, length: int) -> Batch:
    return {**_coded(rows, length), "timestep": _times(rows)}


def _described(rows: int, length: int) -> Batch:
    return {**_denoised(rows, length), "encoder_hidden_states": _text(rows)}


def _latent(rows: int, length: int) -> Batch:
    image = _to_itself("hidden_states", rows, 3, IMAGE, IMAGE)
    return {**image, "timestep": _times(rows), "encoder_hidden_states": _text(rows)}


def _pooled_latent(rows: int, length: int) -> Batch:
    return {**_latent(rows, length), "pooled_projections": torch.randn(rows, TEXT)}


def _classed_latent(rows: int, length: int) -> Batch:
    image = _to_itself("hidden_states", rows, 3, IMAGE, IMAGE)
    return {**image, "timestep": _times(rows), "class_labels": classes(rows)}


def _video(rows: int, length: int) -> Batch:
    video = _to_itself("hidden_states", rows, FRAMES, 3, IMAGE, IMAGE)
    return {**video, "timestep": _times(rows), "encoder_hidden_states": _text(rows)}


def _embedding(rows: int, length: int) -> Batch:
    embedding = _to_itself("hidden_states", rows, TEXT)
    return {
        **embedding,
        "timestep": _times(rows),
        "proj_embedding": torch.randn(rows, TEXT),
        "encoder_hidden_states": _text(rows),
    }


def _sound(rows: int, length: int) -> Batch:
    return {**_to_itself("sample", rows, 4, 16), "timestep": _times(rows)}


def _times(rows: int) -> Tensor:
    return torch.randint(0, 1000, (rows,))


def _text(rows: int) -> Tensor:
    return torch.randn(rows, TOKENS, TEXT)


FAMILIES = [
    *_trained_on(_denoised, DENOISERS),
    *_trained_on(_described, CONDITIONAL),
    *_trained_on(_latent, LATENT),
    *_trained_on(_pooled_latent, POOLED),
    *_trained_on(_classed_latent, CLASSED),
    *_trained_on(_video, VIDEOS),
    *_trained_on(_embedding, EMBEDDINGS),
    *_trained_on(_sound, SOUNDS),
    *_trained_on(_coded, CODERS),
]
