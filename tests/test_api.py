"""What `auto_parallelize` takes: a batch now or with the first call, options, labels, plans by a word."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hetu_fx
from hetu_fx.errors import BatchError, HetuFxError, PlanError, StateError


class Net(nn.Module):
    """Returns logits, of which the script makes the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        made: Tensor = self.down(self.up(x).relu())
        return made


X, Y = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4), torch.tensor([0, 2, 1, 1, 0])


def parallel(model: nn.Module, *batch: Any, **options: Any) -> Any:
    return hetu_fx.auto_parallelize(model, *batch, **{"plan": hetu_fx.Plan.single(), "check": False, **options})


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("capture", ["graph", "eager"])
@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), lambda out, target: F.cross_entropy(out, target)])
def test_a_criterion_takes_the_labels_that_forward_does_not(loss_fn: Any, capture: str) -> None:
    plain = Net()
    F.cross_entropy(plain(X), Y).backward()
    model = parallel(Net(), (X, Y), loss_fn=loss_fn, capture=capture)
    for made in (model(X, Y), model(x=X, target=Y)):
        model.zero_grad()
        made.loss.backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
        torch.testing.assert_close(made.output, plain(X))


def test_evaluation_needs_no_labels_and_training_says_which_are_missing() -> None:
    model = parallel(Net(), (X, Y), loss_fn=nn.CrossEntropyLoss())
    with pytest.raises(BatchError, match=r"loss_fn cannot be called.*'target'"):
        model(X)
    torch.testing.assert_close(model.eval()(X), Net()(X))


def test_without_a_batch_the_first_call_makes_the_model_parallel() -> None:
    plain, own = Net(), Net()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, own)]
    model = parallel(own, optimizer=optimizers[1], loss_fn=nn.CrossEntropyLoss())
    assert model is own
    assert not hasattr(model, "hetu")
    copied: Any = copy.deepcopy(model)
    for _ in range(3):
        losses = [F.cross_entropy(plain(X), Y), model(X, Y).loss]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*losses)
    assert model.hetu.current
    torch.testing.assert_close(copied(X, Y).loss, F.cross_entropy(Net()(X), Y))


def test_a_batch_may_still_be_given_before_the_first_call() -> None:
    model = parallel(parallel(Net()), (X,))
    assert model.hetu.current
    torch.testing.assert_close(model(X), Net()(X))


def test_a_forward_that_is_replaced_before_the_first_call_is_refused() -> None:
    model = parallel(Net())
    model.forward = lambda x: x
    with pytest.raises(StateError, match="forward of this model was replaced before its first call"):
        model(X)


def test_options_given_as_arguments_work_and_say_how_they_are_given_now() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"homes_follow=\.\.\. is options=hetu_fx.Options\(homes_follow=\.\.\.\) now"
    ):
        old = parallel(Net(), (X,), homes_follow=False)
    new = parallel(Net(), (X,), options=hetu_fx.Options(homes_follow=False))
    assert old.hetu.homes_follow is new.hetu.homes_follow is False


def test_an_argument_that_never_was_one_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'home_follow' \(did you mean 'homes_follow'\?\)"):
        parallel(Net(), (X,), home_follow=False)


def test_options_check_themselves() -> None:
    with pytest.raises(StateError, match="warm is 1\\nhint: give True or False"):
        hetu_fx.Options(warm=1)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"give hetu_fx\.Options"):
        parallel(Net(), (X,), options={"warm": True})


@pytest.mark.parametrize("word", ["data", "tensor", "pipeline"])
def test_a_plan_by_a_word_is_for_all_ranks(word: str) -> None:
    assert parallel(Net(), (X,), plan=word).hetu.plan == hetu_fx.Plan.single()


def test_a_plan_file_that_is_not_there_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=rf"no plan file 'mine.json' in {tmp_path}\nhint: .*'auto', 'data', 'tensor'"):
        parallel(Net(), (X,), plan=tmp_path / "mine.json")
    with pytest.raises(PlanError, match="no plan file 'dta' in"):
        parallel(Net(), (X,), plan="dta")


def compiled() -> nn.Module:
    model: nn.Module = torch.compile(Net())  # type: ignore[assignment]
    return model


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a tensor as batch": (Net, {"batch": X}, "whose rows would be taken for arguments"),
    "a class of optimizers": (Net, {"optimizer": torch.optim.SGD}, r"the class SGD\nhint: .*model.parameters\(\)"),
    "a list of optimizers": (Net, {"optimizer": []}, "optimizer is a list"),
    "an optimizer of another model": (
        Net,
        {"optimizer": torch.optim.SGD(Net().parameters())},
        "none of this model's parameters",
    ),
    "a wrapper": (lambda: nn.DataParallel(Net()), {}, r"it is wrapped in DataParallel[\s\S]*model.module"),
    "a wrapped part": (lambda: nn.Sequential(nn.DataParallel(Net())), {}, "its part '0' is wrapped in DataParallel"),
    "a compiled model": (compiled, {}, "wrapped in OptimizedModule[\\s\\S]*compile='inductor'"),
    "a function": (lambda: forward_alone, {}, "model is a function"),
}


def forward_alone(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(("make", "given", "says"), list(WRONG.values()), ids=list(WRONG))
def test_what_would_train_something_else_is_refused_at_once(make: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(HetuFxError, match=says):
        hetu_fx.auto_parallelize(make(), **{"batch": (X,), **given})


class Talks(Net):
    """Prints in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        print("shape", x.shape)
        return super().forward(x)


def test_a_forward_that_prints_does_so_once_and_is_told(capsys: Any) -> None:
    with pytest.warns(UserWarning, match=r"test_api.py:\d+: the forward prints[\s\S]*model.hetu.observe"):
        model = parallel(Talks(), (X,))
    printed = capsys.readouterr().out
    assert "shape" in printed
    torch.testing.assert_close(model(X), Net()(X))
    assert capsys.readouterr().out == ""
