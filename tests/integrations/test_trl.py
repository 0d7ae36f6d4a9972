"""A parallel model scores tokens as trl's own fused head does; what trl logs comes from these scores."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from hetu_fx.integrations import trl
from tests import model_zoo


def test_scores_are_those_of_the_fused_head() -> None:
    torch.manual_seed(0)
    model, batch = model_zoo.llama(), model_zoo.causal_batch(3, 9)
    found = trl._scores(model(**batch), batch["labels"])
    fields = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits")
    add_fused_lm_head(model, outputs=(*fields, "is_top1"))
    wanted = model(**batch, fused_lm_head=True)
    for name in fields:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    assert found.is_top1.tolist() == wanted.is_top1.bool().tolist()
    assert torch.equal(found.label_mask, wanted.label_mask)


@pytest.mark.parametrize("field", ["log_probs", "entropy"])
def test_gradients_of_scores_are_those_of_the_fused_head(field: str) -> None:
    found, wanted = ({}, {})
    for gradients, is_parallel in ((found, True), (wanted, False)):
        torch.manual_seed(0)
        model, batch = model_zoo.llama(), model_zoo.causal_batch(3, 9)
        add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
        forward = trl._from_logits(model.forward.__func__) if is_parallel else model.forward
        scores = forward(**batch, fused_lm_head=True)
        (getattr(scores, field) * torch.arange(8.0)).sum().backward()
        gradients.update({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_a_model_that_scores_from_its_logits_gives_its_outputs_where_it_is_not_asked_for_scores() -> None:
    model, batch = model_zoo.llama(), model_zoo.causal_batch(3, 9)
    wanted = model(**batch)
    add_fused_lm_head(model)
    assert torch.equal(trl._from_logits(model.forward.__func__)(**batch).logits, wanted.logits)


def test_what_training_gives_no_outputs_of_is_not_a_number() -> None:
    scores = trl._scores(SimpleNamespace(logits=None), torch.tensor([[1, 2, -100]]))
    assert scores.entropy.isnan().all()
    assert scores.label_mask.tolist() == [[True, False]]


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_only_the_loss_of_labels_is_the_models_own(loss_type: str) -> None:
    arguments = SimpleNamespace(loss_type=loss_type)
    trainer = SimpleNamespace(args=arguments, label_smoother=None, compute_loss_func=None, aux_loss_enabled=False)
    assert trl._is_the_models(trainer) == (loss_type == "nll")
