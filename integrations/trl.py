"""trl: the loss that `SFTTrainer` takes of a parallel model, and what it logs of each token.

It puts a forward of its own in a model: the backbone alone, and the weight of the head in an autograd function of its
own, in tiles. Nothing of that would run in parallel. A parallel model scores the tokens from its logits instead; its
ordinary loss is the model's own, which every plan can have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hetu_fx.base.patches import Patch, register_patch
from hetu_fx.integrations.transformers import counting_rows_once

_IGNORED = -100


def _with_the_models_loss(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Make `SFTTrainer.compute_loss` run parallel models by their own forward."""
    from transformers import Trainer

    @functools.wraps(compute_loss)
    def with_the_models_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not hasattr(self.model, "hetu"):
            return compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        if not _is_the_models(self):
            return compute_loss(self, _Scoring(model), inputs, return_outputs, num_items_in_batch)
        inputs["use_cache"] = False  # as it does
        loss, outputs = Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
        with torch.no_grad():  # for what it logs
            scores = _scores(outputs, inputs["labels"])
            compute_loss(self, lambda **_: scores, inputs, False, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    return with_the_models_loss


def _is_the_models(trainer: Any) -> bool:
    """Tell whether the loss is what the model's forward computes from labels."""
    own = trainer.args.loss_type == "nll" and trainer.label_smoother is None and trainer.compute_loss_func is None
    return own and not trainer.aux_loss_enabled


class _Scoring:
    """A parallel model that scores tokens where it is asked for trl's fused head."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        """Return the scores of each token, or the model's outputs."""
        if not fused_lm_head:
            return self.model(*args, **inputs)
        labels = inputs.pop("labels")
        return _scores(self.model(*args, **inputs), labels)


def _scores(outputs: Any, labels: Tensor) -> SimpleNamespace:
    """Return what trl's fused head does, of this process's rows: zero where labels are ignored, nan without logits."""
    labels, aux_loss = labels[:, 1:], getattr(outputs, "aux_loss", None)
    mask = labels != _IGNORED
    if not isinstance(getattr(outputs, "logits", None), Tensor):
        unknown = torch.full(mask.shape, torch.nan, device=mask.device)
        return SimpleNamespace(log_probs=unknown, entropy=unknown, is_top1=unknown, label_mask=mask)
    logits = outputs.logits[:, :-1].float()
    negative = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none")
    with torch.no_grad():
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1).masked_fill(~mask, 0)
    return SimpleNamespace(
        log_probs=-negative,
        entropy=entropy,
        is_top1=(logits.argmax(-1) == labels) & mask,
        label_mask=mask,
        aux_loss=aux_loss if isinstance(aux_loss, Tensor) else None,
    )


register_patch(
    Patch(
        "trl", "trl.trainer.sft_trainer", "SFTTrainer", "compute_loss",
        why="its fused head would run on each process alone, beside the parallel model",
        tested="1.16",
        wrap=_with_the_models_loss,
    )
)  # fmt: skip
register_patch(
    Patch(
        "trl", "trl.trainer.sft_trainer", "SFTTrainer", "prediction_step",
        why="the loss of evaluation would count rows twice that fill up the last batch of all processes",
        tested="1.16",
        wrap=counting_rows_once,
    )
)  # fmt: skip
