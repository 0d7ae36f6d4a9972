"""timm: a small model of each of its modules, with fewer and narrower layers where it takes such options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import timm
from timm.models import mlp_mixer, mvitv2
from torch import nn

from benchmarks.families import batches
from benchmarks.zoo.objectives import cross_entropy, images_of, of_library

Options = dict[str, Any]

VIT: Options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
WINDOWS: Options = {"img_size": 64, "window_size": 4, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 4)}
ONE_EACH: Options = {"depths": (1, 1, 1, 1)}
NARROW: Options = {"embed_dims": (16, 16, 32, 32)}
DIMS: Options = {"dims": (16, 16, 32, 32)}
MIXER: Options = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 2}
MVIT = mvitv2.MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=(16, 16, 32, 32), num_heads=2)
FEW: Options = {"layers": (1, 1, 1, 1)}

MODELS: Mapping[int, Mapping[str, Options]] = {
    32: {
        "convmixer.ConvMixer": {"dim": 16, "depth": 2, "kernel_size": 3, "patch_size": 4},
        "mlp_mixer.MlpMixer": MIXER,
        "mlp_mixer.MlpMixer (gated)": MIXER
        | {"block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": timm.layers.GatedMlp, "mlp_ratio": 2},
        "mlp_mixer.MlpMixer (affine)": MIXER
        | {"block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine, "mlp_ratio": 2},
        "beit_base_patch16_224": VIT,
        "cait_xxs24_224": VIT,
        "convit_tiny": VIT | {"local_up_to_layer": 1},
        "deit_tiny_distilled_patch16_224": VIT,
        "eva02_tiny_patch14_224": VIT,
        "naflexvit_base_patch16_gap": {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4},
        "samvit_base_patch16_224": VIT | {"global_attn_indexes": (1,), "window_size": 2},
        "test_vit": {"img_size": 32},
        "test_vit3": {"img_size": 32},
        "tnt_s_legacy_patch16_224": {"img_size": 32, "embed_dim": 32, "inner_dim": 8, "depth": 2, "num_heads_outer": 4},
        "vit_relpos_small_patch16_224": VIT,
        "vit_srelpos_small_patch16_224": VIT,
        "xcit_nano_12_p8_224": VIT | {"img_size": 32},
    },
    64: {
        "densenet.DenseNet": {"growth_rate": 4, "block_config": (2, 2, 2, 2)},
        "focalnet.FocalNet": ONE_EACH | {"embed_dim": 16},
        "metaformer.MetaFormer": ONE_EACH | DIMS,
        "nest.Nest": {"img_size": 64, "embed_dims": (16, 16, 32), "num_heads": (2, 2, 2), "depths": (1, 1, 1)},
        "mvitv2.MultiScaleVit": {"cfg": MVIT, "img_size": 64},
        "sequencer.Sequencer2d": {
            "layers": (1, 1, 1, 1),
            "patch_sizes": (4, 2, 1, 1),
            "embed_dims": (16, 16, 16, 16),
            "hidden_sizes": (4, 4, 4, 4),
            "mlp_ratios": (2, 2, 2, 2),
            "img_size": 64,
        },
        "tiny_vit.TinyVit": ONE_EACH | NARROW | {"num_heads": (2, 2, 2, 2), "window_sizes": (4, 4, 4, 2)},
        "gcvit.GlobalContextVit": ONE_EACH | {"img_size": 64, "num_heads": (2, 2, 2, 2), "embed_dim": 16},
        "volo.VOLO": {
            "layers": (1, 1),
            "img_size": 64,
            "embed_dims": (16, 32),
            "num_heads": (2, 4),
            "downsamples": (True, False),
            "outlook_attention": (True, False),
            "use_mix_token": False,
        },
        "coat_tiny": {
            "img_size": 64,
            "serial_depths": (1, 1, 1, 1),
            "embed_dims": (16, 16, 16, 16),
            "parallel_depth": 1,
        },
        "coat_lite_tiny": {"img_size": 64, "serial_depths": (1, 1, 1, 1), "embed_dims": (16, 16, 16, 16)},
        "cs3darknet_focus_s": {},
        "cspnext_tiny": {},
        "davit_tiny": ONE_EACH | {"embed_dims": (16, 16, 32, 32), "num_heads": (2, 2, 2, 2), "window_size": 2},
        "dla46x_c": {},
        "edgenext_xx_small": {"depths": (1, 1, 2, 1)},
        "efficientvit_b0": ONE_EACH,
        "efficientvit_m0": {"img_size": 64, "depth": (1, 1, 1)},
        "fasternet_t0": ONE_EACH | {"embed_dim": 16},
        "fastvit_t8": FEW | NARROW,
        "ghostnet_050": {},
        "hgnetv2_b0": {},
        "inception_next_atto": ONE_EACH | {"dims": (16, 16, 32, 32)},
        "levit_128s": {
            "img_size": 64,
            "embed_dim": (16, 16, 32),
            "num_heads": (2, 2, 2),
            "depth": (1, 1, 1),
            "key_dim": 8,
        },
        "lcnet_035": {},
        "mobilenetv3_small_050": {},
        "mnasnet_small": {},
        "mobileone_s0": {},
        "mobilevit_xxs": {},
        "pit_ti_224": {"img_size": 64, "base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (2, 2, 2)},
        "pvt_v2_b0": ONE_EACH | {"embed_dims": (16, 16, 32, 32), "num_heads": (1, 2, 2, 2)},
        "regnetx_002": {},
        "repghostnet_050": {},
        "repvit_m1": {"embed_dim": (16, 16, 32, 32), "depth": (1, 1, 2, 1)},
        "res2net50_14w_8s": FEW,
        "resnet10t": {},
        "legacy_seresnet18": {"layers": (1, 1, 1, 1)},
        "rdnet_tiny": {
            "num_init_features": 16,
            "growth_rates": (8, 8),
            "num_blocks_list": (1, 1),
            "is_downsample_block": (None, True),
            "transition_compression_ratio": 0.5,
            "block_type": ("Block", "BlockESE"),
        },
        "rexnet_100": {"width_mult": 0.25},
        "starnet_s050": {},
        "swiftformer_xs": {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32)},
        "swin_tiny_patch4_window7_224": WINDOWS,
        "swinv2_tiny_window8_256": WINDOWS,
        "swinv2_cr_tiny_224": WINDOWS,
        "test_byobnet": {},
        "test_convnext": {},
        "test_convnext2": {},
        "test_efficientnet": {},
        "test_efficientnet_gn": {},
        "test_mambaout": {},
        "test_nfnet": {},
        "test_resnet": {},
        "twins_svt_small": {
            "img_size": 64,
            "depths": (1, 1, 1, 1),
            "embed_dims": (16, 16, 32, 32),
            "num_heads": (2, 2, 2, 2),
            "wss": (4, 4, 2, 2),
        },
        "twins_pcpvt_small": {
            "img_size": 64,
            "depths": (1, 1, 1, 1),
            "embed_dims": (16, 16, 32, 32),
            "num_heads": (2, 2, 2, 2),
        },
        "visformer_tiny": {"img_size": 64, "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2},
        "ese_vovnet19b_slim_dw": {},
        "hiera_tiny_224": {"img_size": 64, "embed_dim": 16, "num_heads": 2, "stages": (1, 1, 1, 1)},
    },
}
"""By the size of their images: models, with options."""


def _made(name: str, options: Options) -> nn.Module:
    """Make what timm has by a name, or by a module and a class, which takes options that the name has fixed."""
    module, _, kind = name.partition(" ")[0].partition(".")
    make = getattr(import_module(f"timm.models.{module}"), kind) if kind else partial(timm.create_model, name)
    made: nn.Module = make(num_classes=batches.CLASSES, **options)
    return made


FAMILIES = [
    family
    for size, models in MODELS.items()
    for family in of_library(
        "timm",
        {name: partial(_made, name, options) for name, options in models.items()},
        cross_entropy,
        images_of(size, "x"),
    )
]
