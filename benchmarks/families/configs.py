"""The tiny configurations of the coverage benchmark: by kind, the model types of transformers with their options.

Sizes differ where they can, so that equal sizes mean equal dims; heads and groups of heads can be cut 2 : 1 and 3 : 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.families.batches import CLASSES, FRAMES, IMAGE, MELS, VOCABULARY

Options = dict[str, Any]

MARKS: Options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
TEXT: Options = {
    **MARKS,
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 112,
    "max_position_embeddings": 64,
}
EXPERTS: Options = {
    **TEXT,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
}
DEEPSEEK: Options = {
    **EXPERTS,
    "num_key_value_heads": 8,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 12,
    "n_shared_experts": 1,
    "topk_method": "greedy",
}
CODERS: Options = {
    **MARKS,
    "vocab_size": VOCABULARY,
    "d_model": 96,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 112,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}
T5: Options = {
    **MARKS,
    "vocab_size": VOCABULARY,
    "d_model": 96,
    "d_kv": 12,
    "d_ff": 112,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 8,
    "decoder_start_token_id": 1,
}
VISION: Options = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 112,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_labels": CLASSES,
}
STAGES: Options = {"num_labels": CLASSES, "image_size": IMAGE}
SWIN: Options = {"embed_dim": 24, "depths": [1, 1], "num_heads": [4, 4], "window_size": 4, "patch_size": 4}
FOUR_STAGES: Options = {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1]}
SOUND: Options = {
    **MARKS,
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 112,
    "conv_dim": (24, 24, 24),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "ctc_zero_infinity": True,
    "num_labels": CLASSES,
}
WHISPER: Options = {
    **CODERS,
    "num_mel_bins": MELS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
}


def _of(common: Options, *names: str) -> dict[str, Options]:
    return dict.fromkeys(names, common)


CAUSAL: Mapping[str, Options] = {
    **_of(TEXT, "apertus", "bloom", "cohere", "diffllama"),
    **_of(TEXT, "exaone4", "falcon", "gpt2", "gpt_neox", "granite"),
    **_of(TEXT, "llama", "mistral", "mpt", "nemotron", "olmo2", "opt"),
    **_of(TEXT, "persimmon", "phi", "qwen2", "qwen3", "starcoder2"),
    **_of(TEXT, "biogpt", "mamba"),
    **_of(EXPERTS, "mixtral", "qwen3_moe", "granitemoe"),
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "deepseek_v2": DEEPSEEK | {"first_k_dense_replace": 1},
    "deepseek_v2 (dense)": DEEPSEEK | {"first_k_dense_replace": 2},
    "llama4_text": TEXT | {"head_dim": 12, "intermediate_size_mlp": 112, "moe_layers": []},
    "gptj": TEXT | {"rotary_dim": 6},
    "gpt_neo": TEXT | {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "stablelm": TEXT | {"partial_rotary_factor": 0.5},
    "helium": TEXT | {"head_dim": 12},
    "glm4": TEXT | {"head_dim": 12},
    "gemma2": TEXT | {"head_dim": 12},
    "gemma3_text": TEXT | {"head_dim": 12},
    "phi3": TEXT | {"partial_rotary_factor": 1.0},
    "xglm": TEXT | {"d_model": 96, "num_layers": 2, "attention_heads": 8, "ffn_dim": 112},
}
MASKED: Mapping[str, Options] = {
    **_of(TEXT, "albert", "bert", "convbert", "deberta", "deberta-v2"),
    **_of(TEXT, "esm", "fnet", "modernbert", "mpnet"),
    **_of(TEXT, "nystromformer", "roberta", "roformer"),
    **_of(TEXT, "yoso"),
    "big_bird": TEXT | {"attention_type": "original_full"},
    "distilbert": TEXT | {"hidden_dim": 112},
    "funnel": MARKS
    | {"vocab_size": VOCABULARY, "block_sizes": [1, 1], "d_model": 96, "n_head": 8, "d_head": 12, "d_inner": 112},
    "mobilebert": TEXT | {"embedding_size": 32, "true_hidden_size": 64, "intra_bottleneck_size": 64},
    "squeezebert": TEXT | {"embedding_size": 96},
}
TRANSLATION: Mapping[str, Options] = {
    **_of(CODERS, "bart", "blenderbot", "m2m_100", "marian", "mbart"),
    **_of(T5, "t5", "umt5"),
}
TEXTS: Mapping[str, Options] = {
    "xlnet": MARKS
    | {"num_labels": CLASSES, "vocab_size": VOCABULARY, "d_model": 96, "n_layer": 2, "n_head": 8, "d_inner": 112},
}
VISIONS: Mapping[str, Options] = {
    **_of(VISION, "beit", "dinov2", "vit"),
    **_of(STAGES | {"hidden_sizes": [24, 40], "depths": [1, 1], "num_stages": 2}, "convnext", "convnextv2"),
    **_of(STAGES | SWIN, "swin", "swinv2"),
    "resnet": STAGES | {"embedding_size": 12, "hidden_sizes": [20, 28], "depths": [1, 1]},
    "regnet": STAGES | {"embedding_size": 12, "hidden_sizes": [20, 28], "depths": [1, 1], "groups_width": 4},
    "bit": STAGES | {"embedding_size": 12, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4},
    "mobilenet_v2": STAGES | {"depth_multiplier": 0.25, "min_depth": 8},
    "poolformer": STAGES | FOUR_STAGES,
    "pvt": STAGES | FOUR_STAGES | {"num_attention_heads": [4, 4, 4, 4], "num_encoder_blocks": 4},
    "segformer": STAGES | FOUR_STAGES | {"num_attention_heads": [4, 4, 4, 4], "decoder_hidden_size": 20},
    "focalnet": STAGES
    | {"embed_dim": 24, "hidden_sizes": [24, 48], "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3]},
    "efficientnet": STAGES | {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320},
    "hiera": {
        "num_labels": CLASSES,
        "image_size": [32, 32],
        "embed_dim": 24,
        "num_heads": [4, 4],
        "depths": [1, 1],
        "query_stride": [2, 2],
        "num_query_pool": 1,
        "masked_unit_size": [4, 4],
        "patch_stride": [4, 4],
    },
    "mobilevit": STAGES | {"hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32]},
    "clip": {"num_labels": CLASSES, "vision_config": VISION, "text_config": TEXT, "projection_dim": 40},
}
SEGMENTATION: Mapping[str, Options] = {
    "segformer (pixels)": STAGES | FOUR_STAGES | {"num_attention_heads": [4, 4, 4, 4], "decoder_hidden_size": 20},
    "mobilenet_v2 (pixels)": STAGES | {"depth_multiplier": 0.25, "min_depth": 8},
}
VIDEO: Mapping[str, Options] = {
    "timesformer": VISION | {"num_frames": 4},
    "videomae": VISION | {"num_frames": 4},
}
WAVES: Mapping[str, Options] = {
    **_of(SOUND, "data2vec-audio", "hubert", "unispeech-sat", "wav2vec2", "wavlm"),
    "wav2vec2-conformer": SOUND | {"conv_depthwise_kernel_size": 7},
    "sew": SOUND | {"squeeze_factor": 2},
}
TRANSCRIBED: Mapping[str, Options] = {"wav2vec2 (ctc)": SOUND}
FRAMED: Mapping[str, Options] = {
    "wav2vec2-bert": SOUND | {"feature_projection_input_dim": MELS, "conv_depthwise_kernel_size": 7},
}
SOUNDS: Mapping[str, Options] = {
    "audio-spectrogram-transformer": VISION
    | {"num_mel_bins": MELS, "max_length": FRAMES, "frequency_stride": 8, "time_stride": 8},
}
SPEECH: Mapping[str, Options] = {"whisper": WHISPER}
SPEECH_FRAMES: Mapping[str, Options] = {
    "speech_to_text": CODERS
    | {
        "input_feat_per_channel": MELS,
        "input_channels": 1,
        "conv_channels": 24,
        "max_source_positions": 64,
        "max_target_positions": 64,
    },
}
CAPTIONED: Mapping[str, Options] = {
    "blip": {"vision_config": VISION, "text_config": TEXT | {"encoder_hidden_size": 96, "is_decoder": True}},
    "git": TEXT | {"vision_config": VISION},
}

KINDS: Mapping[str, Mapping[str, Options]] = {
    "causal": CAUSAL,
    "masked": MASKED,
    "translation": TRANSLATION,
    "text": TEXTS,
    "image": VISIONS,
    "pixels": SEGMENTATION,
    "video": VIDEO,
    "wave": WAVES,
    "transcription": TRANSCRIBED,
    "frames": FRAMED,
    "sound": SOUNDS,
    "speech": SPEECH,
    "speech frames": SPEECH_FRAMES,
    "caption": CAPTIONED,
}
IN_FLOAT32 = frozenset({"deepseek_v2", "granitemoe", "mixtral", "qwen2_moe", "qwen3_moe", "xglm"})
WHOLE_BATCH = frozenset(
    {
        "resnet",
        "regnet",
        "mobilenet_v2",
        "efficientnet",
        "mobilevit",
        "segformer (pixels)",
        "mobilenet_v2 (pixels)",
        "wav2vec2-conformer",
    }
)
FIXED_LENGTH = frozenset({"mamba", "funnel"})
