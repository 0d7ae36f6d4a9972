"""What a forward leaves in an attribute cannot be used, whatever is tried with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetu_fx.errors import StateError
from hetu_fx.program.reads import NotKept, is_of_the_trace

USES: list[Callable[[Any], Any]] = [
    lambda value: value.mean(), float, len, bool, iter, lambda value: value + 1, lambda value: 1 - value,
    lambda value: value[0], lambda value: value == 1, lambda value: torch.ones(2) * value, lambda value: value(),
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_any_use_is_refused(use: Callable[[Any], Any]) -> None:
    with pytest.raises(StateError, match="'last' of the model is set by the forward"):
        use(NotKept("'last' of the model"))


def test_models_that_have_some_can_be_copied_and_pickled() -> None:
    kept = NotKept("'last' of the model")
    assert repr(copy.deepcopy(kept)) == repr(pickle.loads(pickle.dumps(kept))) == repr(kept)


def test_only_what_is_left_of_a_trace_is_not_kept() -> None:
    assert not any(map(is_of_the_trace, (1, None, "text", [1, (2.0,)], {"a": print}, torch.float32)))
    assert all(map(is_of_the_trace, (torch.ones(1), [torch.ones(1)], {"a": (torch.ones(1),)}, object())))
