"""Batches for the model families of the coverage benchmark: `maker(rows, length)` gives keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]
MakeBatch = Callable[[int, int], Batch]

VOCABULARY = 97
CLASSES = 13
FIRST_WORD = 5  # smaller ids stand for padding, begin, end and other marks
IMAGE = 32
SAMPLES = 1400
MELS = 16
FRAMES = 48
IGNORED = -100


def causal(rows: int, length: int) -> Batch:
    """Predict each next token; the first labels of a row are ignored, more in later rows."""
    ids = words(rows, length)
    return {"input_ids": ids, "labels": partly_ignored(ids)}


def masked(rows: int, length: int) -> Batch:
    """Predict masked tokens of rows of unequal length."""
    ids = words(rows, length)
    return {"input_ids": ids, "attention_mask": lengths_mask(rows, length), "labels": partly_ignored(ids)}


def translation(rows: int, length: int) -> Batch:
    """Predict a shorter sequence from one that is padded."""
    labels = partly_ignored(words(rows, length - 4))
    return {"input_ids": words(rows, length), "attention_mask": lengths_mask(rows, length), "labels": labels}


def classified_text(rows: int, length: int) -> Batch:
    """Put texts into classes."""
    return {"input_ids": words(rows, length), "attention_mask": lengths_mask(rows, length), "labels": classes(rows)}


def image(rows: int, length: int) -> Batch:
    """Put images into classes."""
    return {"pixel_values": pixels(rows), "labels": classes(rows)}


def segmented(rows: int, length: int) -> Batch:
    """Put pixels into classes, some of them ignored."""
    labels = torch.randint(0, CLASSES, (rows, IMAGE, IMAGE))
    labels[0, : IMAGE // 2] = 255
    return {"pixel_values": pixels(rows), "labels": labels}


def video(rows: int, length: int) -> Batch:
    """Put videos of four frames into classes."""
    return {"pixel_values": torch.randn(rows, 4, 3, IMAGE, IMAGE), "labels": classes(rows)}


def transcribed_wave(rows: int, length: int) -> Batch:
    """Transcribe sound waves by connectionist temporal classification."""
    return {"input_values": torch.randn(rows, SAMPLES), "labels": words(rows, 3)}


def classified_wave(rows: int, length: int) -> Batch:
    """Put sound waves into classes."""
    return {"input_values": torch.randn(rows, SAMPLES), "labels": classes(rows)}


def spectrogram(rows: int, length: int) -> Batch:
    """Transcribe spectrograms (mel bins x frames) by a decoder."""
    return {"input_features": torch.randn(rows, MELS, FRAMES), "labels": partly_ignored(words(rows, length))}


def framed_spectrogram(rows: int, length: int) -> Batch:
    """Transcribe spectrograms (frames x mel bins) by a decoder."""
    return {"input_features": torch.randn(rows, FRAMES, MELS), "labels": partly_ignored(words(rows, length))}


def classified_frames(rows: int, length: int) -> Batch:
    """Put spectrograms (frames x mel bins) into classes, by another name."""
    return {"input_features": torch.randn(rows, FRAMES, MELS), "labels": classes(rows)}


def classified_spectrogram(rows: int, length: int) -> Batch:
    """Put spectrograms (frames x mel bins) into classes."""
    return {"input_values": torch.randn(rows, FRAMES, MELS), "labels": classes(rows)}


def captioned(rows: int, length: int) -> Batch:
    """Predict the words of texts that come with an image."""
    ids = words(rows, length)
    return {"input_ids": ids, "pixel_values": pixels(rows), "labels": partly_ignored(ids)}


def read_image(rows: int, length: int) -> Batch:
    """Predict the words that an image shows."""
    return {"pixel_values": pixels(rows), "labels": partly_ignored(words(rows, length))}


def unlabelled(rows: int, length: int) -> Batch:
    """Make images and nothing else."""
    return {"pixel_values": pixels(rows)}


def field(rows: int, length: int) -> Batch:
    """Map a field of two channels to one of one."""
    return {"field": torch.randn(rows, 2, 16, 16), "target": torch.randn(rows, 1, 16, 16)}


def signal(rows: int, length: int) -> Batch:
    """Put signals of six channels into classes."""
    return {"signal": torch.randn(rows, 2 * length, 6), "labels": classes(rows)}


def pixels(rows: int) -> Tensor:
    """Make random images."""
    return torch.randn(rows, 3, IMAGE, IMAGE)


def classes(rows: int) -> Tensor:
    """Make random classes."""
    return torch.randint(0, CLASSES, (rows,))


def words(rows: int, length: int) -> Tensor:
    """Make random token ids that stand for words."""
    return torch.randint(FIRST_WORD, VOCABULARY, (rows, length))


def partly_ignored(ids: Tensor) -> Tensor:
    """Give labels of which each row ignores another number."""
    labels = ids.clone()
    for row in range(len(labels)):
        labels[row, : row % (labels.size(1) - 1)] = IGNORED
    return labels


def lengths_mask(rows: int, length: int) -> Tensor:
    """Make a mask that hides the ends of some rows."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    mask[-1, length - 3 :] = 0
    return mask
