"""The model families of the coverage benchmark: what each is made from, and the batches it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from benchmarks.families import batches
from benchmarks.families.autoencoders import AUTOENCODERS
from benchmarks.families.classifiers import CLASSIFIERS, SEGMENTERS
from benchmarks.families.configs import FIXED_LENGTH, IN_FLOAT32, KINDS, WHOLE_BATCH
from benchmarks.families.family import Family
from benchmarks.families.nets import NETS, NETS_OF_PIXELS
from benchmarks.families.recurrent import CELLS, LAYERS
from benchmarks.families.spectral import FIELDS, ROTATED, SIGNALS

AUTO: Mapping[str, tuple[Any, batches.MakeBatch]] = {
    "causal": (hf.AutoModelForCausalLM, batches.causal),
    "masked": (hf.AutoModelForMaskedLM, batches.masked),
    "translation": (hf.AutoModelForSeq2SeqLM, batches.translation),
    "text": (hf.AutoModelForSequenceClassification, batches.classified_text),
    "image": (hf.AutoModelForImageClassification, batches.image),
    "pixels": (hf.AutoModelForSemanticSegmentation, batches.segmented),
    "video": (hf.AutoModelForVideoClassification, batches.video),
    "wave": (hf.AutoModelForAudioClassification, batches.classified_wave),
    "transcription": (hf.AutoModelForCTC, batches.transcribed_wave),
    "frames": (hf.AutoModelForAudioClassification, batches.classified_frames),
    "sound": (hf.AutoModelForAudioClassification, batches.classified_spectrogram),
    "speech": (hf.AutoModelForSpeechSeq2Seq, batches.spectrogram),
    "speech frames": (hf.AutoModelForSpeechSeq2Seq, batches.framed_spectrogram),
    "caption": (hf.AutoModelForImageTextToText, batches.captioned),
}


def _pretrained(kind: str, name: str, options: Mapping[str, Any]) -> Family:
    auto, batch = AUTO[kind]
    dtype = torch.float32 if name in IN_FLOAT32 else torch.float64
    micro_batches = 1 if name in WHOLE_BATCH else 2
    return Family(name, kind, lambda: _make(auto, name, options), batch, dtype, micro_batches, name in FIXED_LENGTH)


def _make(auto: Any, name: str, options: Mapping[str, Any]) -> nn.Module:
    config = hf.AutoConfig.for_model(name.partition(" ")[0], **options)
    _drop_nothing(config)
    model: nn.Module = auto.from_config(config)
    return model.train()


def _drop_nothing(config: hf.PretrainedConfig) -> None:
    """Set every rate of dropout to 0, in parts of the configuration too; masks have tests of their own."""
    for name, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            _drop_nothing(value)
        elif isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
            setattr(config, name, 0.0)


def _nets(
    made: Mapping[str, Callable[[], nn.Module]], batch: batches.MakeBatch, *, fixed_length: bool = False
) -> Iterator[Family]:
    for name, make in made.items():
        yield Family(name, "net", partial(_trained, make), batch, micro_batches=1, fixed_length=fixed_length)


def _trained(make: Callable[[], nn.Module]) -> nn.Module:
    return make().train()


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        *(_pretrained(kind, name, options) for kind, names in KINDS.items() for name, options in names.items()),
        *_nets({**NETS, **CLASSIFIERS}, batches.image),
        *_nets({**NETS_OF_PIXELS, **SEGMENTERS}, batches.segmented),
        *_nets(FIELDS, batches.field),
        *_nets(SIGNALS, batches.signal),
        *_nets({**ROTATED, **LAYERS}, batches.causal),
        *_nets(CELLS, batches.causal, fixed_length=True),
        *_nets(AUTOENCODERS, batches.unlabelled),
    )
}
