"""trl: the loss that its trainers take of a parallel model, and what they log of each token.

They put a forward of their own in a model: the backbone alone, and the weight of the head in an autograd function of
trl's, in tiles. Nothing of that would run in parallel. A parallel model scores the tokens from its logits instead;
`SFTTrainer`'s ordinary loss is the model's own, which every plan can have.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hetu_fx import is_parallel
from hetu_fx.base.patches import Patch, register_patch, register_substitute
from hetu_fx.integrations.transformers import counting_rows_once

_IGNORED = -100


def _with_the_models_loss(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Make `SFTTrainer.compute_loss` run parallel models by their own forward."""
    from transformers import Trainer

    @functools.wraps(compute_loss)
    def with_the_models_loss(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not is_parallel(self.model):
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
    """The forward of a parallel model, which scores tokens where it is asked for trl's fused head."""

    def __init__(self, forward: Callable[..., Any], temperature: float = 1.0, in_fp32: bool = True) -> None:
        self.forward, self.temperature, self.in_fp32 = forward, temperature, in_fp32

    def __call__(self, *args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        """Return the scores of each token, or the model's outputs."""
        if not fused_lm_head:
            return self.forward(*args, **inputs)
        labels = inputs.pop("labels")
        return _scores(self.forward(*args, **inputs), labels, self.temperature, self.in_fp32)


def _from_logits(fused: FunctionType) -> Callable[..., Any]:
    """Return what scores as a forward with trl's fused head does, by the forward that this one has found."""
    known = inspect.getclosurevars(fused).nonlocals
    scoring = _Scoring(known["original_forward"], known["temperature"], known["cast_lm_head_to_fp32"])
    return functools.wraps(fused)(scoring)  # `generate` reads its signature


def _scores(outputs: Any, labels: Tensor, temperature: float = 1.0, in_fp32: bool = True) -> SimpleNamespace:
    """Return what trl's fused head does, of this process's rows: zero where labels are ignored, nan without logits."""
    labels, aux_loss = labels[:, 1:], getattr(outputs, "aux_loss", None)
    mask = labels != _IGNORED
    if not isinstance(getattr(outputs, "logits", None), Tensor):
        unknown = torch.full(mask.shape, torch.nan, device=mask.device)
        return SimpleNamespace(log_probs=unknown, entropy=unknown, is_top1=unknown, label_mask=mask)
    logits = outputs.logits[:, :-1] / temperature
    logits = logits.float() if in_fp32 else logits
    log_probs = logits.log_softmax(-1)
    with torch.no_grad():
        known = {
            "log_sum_sq_probs": (2 * log_probs).logsumexp(-1).masked_fill(~mask, 0),
            "mean_logits": logits.mean(-1).masked_fill(~mask, 0),
            "is_top1": (logits.argmax(-1) == labels) & mask,
        }
    return SimpleNamespace(
        log_probs=log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0),
        entropy=-(log_probs.exp() * log_probs).sum(-1).masked_fill(~mask, 0),
        label_mask=mask,
        aux_loss=aux_loss if isinstance(aux_loss, Tensor) else None,
        **known,
    )


register_substitute("trl.trainer.utils", "add_fused_lm_head.<locals>._fused_forward", _from_logits)
register_patch(
    Patch(
        "trl", "trl.trainer.sft_trainer", "SFTTrainer", "compute_loss",
        why="its fused head would run on each rank alone, outside of the parallel model",
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
