"""What is logged of a parallel model that trl's SFTTrainer trains is what trl's own fused head scores."""

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
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    wanted = model(**batch, fused_lm_head=True)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    assert found.is_top1.tolist() == wanted.is_top1.bool().tolist()
    assert torch.equal(found.label_mask, wanted.label_mask)


def test_what_training_gives_no_outputs_of_is_not_a_number() -> None:
    scores = trl._scores(SimpleNamespace(logits=None), torch.tensor([[1, 2, -100]]))
    assert scores.entropy.isnan().all()
    assert scores.label_mask.tolist() == [[True, False]]


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_only_the_loss_of_labels_is_the_models_own(loss_type: str) -> None:
    arguments = SimpleNamespace(loss_type=loss_type)
    trainer = SimpleNamespace(args=arguments, label_smoother=None, compute_loss_func=None, aux_loss_enabled=False)
    assert trl._is_the_models(trainer) == (loss_type == "nll")
