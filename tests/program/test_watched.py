"""What a forward reads is found while it is traced, and the model is captured again when it has changed."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, getweakrefs

import pytest
import torch
from torch import Tensor, nn

from hetu_fx.base.torch_private import without_weak_references
from hetu_fx.errors import CaptureError, StateError
from hetu_fx.program.reads import NotKept
from tests.program.guarded import GLOBAL, Guarded, Settings, Watching


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    GLOBAL["shift"], Guarded.power, LOOKED_UP["n"] = 0.0, 1.0, 2.0
    vars(SCALES).clear()
    SCALE.set(1.0)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an attribute": (lambda m: setattr(m, "scale", 2.0), "'scale' of the model: 1.0 -> 2.0"),
    "an attribute of a submodule": (lambda m: setattr(m.dropout, "p", 0.0), "'p' of module 'dropout': 0.5 -> 0.0"),
    "a momentum": (lambda m: setattr(m.norm, "momentum", 0.5), "'momentum' of module 'norm': 0.1 -> 0.5"),
    "a field": (lambda m: setattr(m.settings, "beta", 2.0), "'beta' of settings of the model: 1.0 -> 2.0"),
    "an object": (lambda m: setattr(m, "settings", Settings()), "was replaced by one like it"),
    "a namespace's field": (lambda m: setattr(m.space, "alpha", 2.0), "'alpha' of space of the model: 1.0 -> 2.0"),
    "a namespace": (lambda m: setattr(m, "space", SimpleNamespace(alpha=1.0)), "was replaced by one like it"),
    "a container": (lambda m: m.weights[1].update(inner=3.0), "'weights' of the model: [1.0, {'inner': 2.0}] -> [1.0"),
    "an attribute of the class": (lambda m: setattr(Guarded, "power", 2.0), "'power' of class Guarded: 1.0 -> 2.0"),
    "hiding the class": (lambda m: setattr(m, "power", 2.0), "'power' of the model: none -> 2.0"),
    "what was not there": (lambda m: setattr(m, "extra", 2.0), "'extra' of the model: none -> 2.0"),
    "a global": (lambda m: GLOBAL.update(shift=2.0), "global 'GLOBAL' of guarded.py: {'shift': 0.0} -> {'shift': 2.0}"),
    "a tensor": (lambda m: m.table.fill_(2.0), "was replaced by one like it"),
    "a forward": (lambda m: setattr(m.layer, "forward", lambda x: x[:, :2]), "'forward' of module 'layer': none -> "),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_a_change_leads_to_another_capture_that_says_why(change: Callable[[Any], Any], told: str) -> None:
    watching = Watching()
    first = watching.program()
    assert watching.program() is first
    change(watching.model)
    second = watching.program()
    assert second is not first
    assert watching.program() is second
    assert told in watching.why


def test_what_becomes_again_what_it_was_finds_its_program() -> None:
    watching = Watching()
    first = watching.program()
    for value in (2.0, 1.0):
        watching.model.scale = value
        last = watching.program()
    assert last is first
    assert watching.programs.events.count == 2


def test_what_the_forward_does_not_read_changes_nothing() -> None:
    watching = Watching()
    first = watching.program()
    for count in range(3):
        watching.model.steps_done = count
        assert watching.program() is first


def test_classes_are_as_they_were_after_a_capture() -> None:
    Watching().program()
    assert "__getattribute__" not in vars(nn.Module) | vars(Settings)
    assert "__setattr__" in vars(nn.Module)
    assert "__setattr__" not in vars(Settings)


def test_no_parameter_is_referred_to_after_a_capture_but_by_its_layer() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.cells(x[None])[0].sum()

    watching = Watching(Recurrent())
    watching.program()
    with without_weak_references(watching.model):
        assert not any(map(getweakrefs, watching.model.parameters()))


def test_what_a_loss_function_reads_counts() -> None:
    criterion, smoothing = nn.HuberLoss(), [0.0]

    def loss_fn(output: Tensor, x: Tensor) -> Tensor:
        return criterion(output, torch.zeros_like(output)) + smoothing[0]

    watching = Watching(loss_fn=loss_fn)
    programs = [watching.program()]
    criterion.delta = 0.5
    programs.append(watching.program())
    smoothing[0] = 1.0
    programs.append(watching.program())
    assert len(set(map(id, programs))) == 3


class Writing(nn.Module):
    """Does something to itself in each call."""

    def __init__(self, act: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.calls, self.seen, self.act = nn.Linear(3, 2), 0, list[Any](), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.act(self, y)
        return y


def counts(module: Any, y: Tensor) -> None:
    module.calls += 1


def appends(module: Any, y: Tensor) -> None:
    module.seen.append(1)


def caches(module: Any, y: Tensor) -> None:
    if getattr(module, "cache", None) is None:
        module.cache = y.mean()


def sets_the_same(module: Any, y: Tensor) -> None:
    module.calls = module.calls * 1


def marks_that_it_has_run(module: Any, y: Tensor) -> None:
    if not module.calls:
        module.calls = 1


def leaves_a_tensor(module: Any, y: Tensor) -> None:
    module.last = y


def leaves_a_number(module: Any, y: Tensor) -> None:
    module.last = y.dim()


@pytest.mark.parametrize("act", [counts, appends, caches])
def test_a_forward_that_keeps_state_in_python_is_refused_and_left_as_it_was(act: Any) -> None:
    watching = Watching(Writing(act))
    with pytest.raises(CaptureError, match="keeps state in Python"):
        watching.program()
    assert (watching.model.calls, watching.model.seen) == (0, [])
    assert getattr(watching.model, "cache", None) is None


class Counted:
    n = 0

    @classmethod
    def counts(cls) -> int:
        cls.n += 1
        return cls.n


class CountsInItsType(Writing):
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).n += 1
        return self.layer(x) * self.n  # type: ignore[no-any-return]


class CountsInItsClass(Writing):
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.__class__.n += 1
        return self.layer(x) * self.n  # type: ignore[no-any-return]


def in_a_default(module: Any, y: Tensor, counts: list[int] = [0]) -> None:  # noqa: B006
    counts[0] += 1


def in_a_keyword_default(module: Any, y: Tensor, *, memory: dict[str, int] = {}) -> None:  # noqa: B006
    memory["n"] = memory.get("n", 0) + 1


def in_an_attribute_of_itself(module: Any, y: Tensor) -> None:
    counted: Any = in_an_attribute_of_itself
    counted.n = getattr(counted, "n", 0) + 1


def by_a_class_method(module: Any, y: Tensor) -> None:
    Counted.counts()


class CountsInItsSpace(Writing):
    @property
    def scale(self) -> int:
        vars(self)["n"] = vars(self).get("n", 0) + 1
        count: int = self.n  # type: ignore[assignment]
        return count

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


def test_a_forward_that_counts_past_its_own_setattr_is_refused_and_left_as_it_was() -> None:
    watching = Watching(CountsInItsSpace(print))
    with pytest.raises(CaptureError, match=r"keeps state in Python.*'n' of the model: none -> 1"):
        watching.program()
    assert "n" not in vars(watching.model)


def test_a_dictionary_that_a_model_shares_with_the_script_stays_shared() -> None:
    settings, watching = {"a": 1.0}, Watching(Writing(lambda module, y: y.mul_(module.settings["a"])))
    watching.model.settings = settings
    first = watching.program()
    assert watching.model.settings is settings
    settings["a"] = 2.0
    assert watching.program() is not first


@pytest.mark.parametrize("kind", [CountsInItsType, CountsInItsClass])
def test_a_forward_that_counts_in_its_own_class_is_refused_and_the_class_left_as_it_was(kind: Any) -> None:
    with pytest.raises(CaptureError, match=rf"keeps state in Python.*{kind.__name__}.n: 0 -> 1"):
        Watching(kind(print)).program()
    assert kind.n == 0


COUNTS: dict[Any, str] = {
    in_a_default: r"default of 'counts' of in_a_default .*: \[0\] -> \[1\]",
    in_a_keyword_default: r"default of 'memory' of in_a_keyword_default .*: {} -> {'n': 1}",
    in_an_attribute_of_itself: r"attributes of in_an_attribute_of_itself .*: {} -> {'n': 1}",
    by_a_class_method: r"Counted.n: 0 -> 1",
}


@pytest.mark.parametrize(("act", "told"), COUNTS.items(), ids=[act.__name__ for act in COUNTS])
def test_a_forward_that_counts_in_what_its_functions_have_is_refused_and_they_are_left_as_they_were(
    act: Any, told: str
) -> None:
    for _ in range(2):  # the second finds what the first has found
        with pytest.raises(CaptureError, match=f"keeps state in Python.*{told}"):
            Watching(Writing(act)).program()


def a_full_queue() -> queue.Queue[float]:
    full = queue.Queue[float]()
    full.put(1.0)
    return full


MEMORIES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a dictionary of the user's kind": (lambda: UserDict(n=0), lambda memory: memory.update(n=memory["n"] + 1)),
    "a list of the user's kind": (lambda: UserList([0]), lambda memory: memory.append(memory[-1])),
    "a chain of dictionaries": (lambda: ChainMap({"n": 0}), lambda memory: memory.update(n=memory["n"] + 1)),
    "a dictionary of weak references": (WeakKeyDictionary, lambda memory: memory.update({Counted: len(memory)})),
    "a queue": (a_full_queue, lambda memory: memory.get_nowait()),
    "a simple queue": (queue.SimpleQueue, lambda memory: memory.put(1)),
    "a count": (itertools.count, next),
    "a cycle": (lambda: itertools.cycle([1.0, 3.0]), next),
    "a generator": (lambda: (n for n in range(99)), next),
    "a partial function": (lambda: partial(list.append, [], 1), lambda memory: memory()),
    "values of a thread": (threading.local, lambda memory: setattr(memory, "n", getattr(memory, "n", 0) + 1)),
    "a context variable": (lambda: ContextVar("n", default=0), lambda memory: memory.set(memory.get() + 1)),
    "a namespace": (lambda: SimpleNamespace(n=0), lambda memory: setattr(memory, "n", memory.n + 1)),
}


@pytest.mark.parametrize(("make", "use"), MEMORIES.values(), ids=MEMORIES)
def test_a_forward_that_remembers_in_an_object_of_pythons_own_library_is_refused(
    make: Callable[[], Any], use: Callable[[Any], Any]
) -> None:
    watching = Watching(Writing(lambda module, y: use(module.memory)))
    watching.model.memory = make()
    with pytest.raises(CaptureError, match="keeps state in Python"):
        watching.program()


SCALES = threading.local()
SCALE = ContextVar("SCALE", default=1.0)
LOOKED_UP = {"n": 2.0}


@lru_cache
def remembered(n: int) -> float:
    return n / 2


def reads_what_scripts_set(module: Any, y: Tensor, table: dict[str, float] = LOOKED_UP) -> None:
    y.mul_(getattr(SCALES, "scale", 1.0) * SCALE.get() * table["n"] * module.times(remembered(3)))


SETS: dict[str, Callable[[Any], Any]] = {
    "a value of a thread": lambda model: setattr(SCALES, "scale", 3.0),
    "a context variable": lambda model: SCALE.set(3.0),
    "a default": lambda model: LOOKED_UP.update(n=3.0),
    "an argument of a partial function": lambda model: model.times.args[0].update(a=3.0),
}


@pytest.mark.parametrize("change", SETS.values(), ids=SETS)
def test_what_scripts_set_in_such_objects_leads_to_another_capture(change: Callable[[Any], Any]) -> None:
    watching = Watching(Writing(reads_what_scripts_set))
    watching.model.times = partial(lambda factors, value: factors["a"] * value, {"a": 2.0})
    first = watching.program()
    assert watching.program() is first
    change(watching.model)
    assert watching.program() is not first


def fills_a_default(module: Any, y: Tensor, tables: dict[int, Tensor] = {}) -> None:  # noqa: B006
    if y.shape[1] not in tables:
        tables[y.shape[1]] = torch.arange(y.shape[1])
    y.add_(tables[y.shape[1]])


def test_a_cache_in_a_default_is_none_and_left_as_it_was() -> None:
    watching = Watching(Writing(fills_a_default))
    assert watching.program() is watching.program()
    assert fills_a_default.__defaults__ == ({},)


@pytest.mark.parametrize("act", [sets_the_same, marks_that_it_has_run])
def test_a_forward_that_only_marks_that_it_has_run_is_captured(act: Any) -> None:
    watching = Watching(Writing(act))
    assert watching.program() is watching.program()


class Weighs(Writing):
    """Weighs its first result otherwise than later ones, by a tensor that its code makes."""

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.tensor(0.5) if not self.calls else torch.tensor(1.0)
        return super().forward(x) * weight


def test_a_mark_by_which_a_constant_is_another_one_is_state() -> None:
    with pytest.raises(CaptureError, match="keeps state in Python"):
        Watching(Weighs(marks_that_it_has_run)).program()


def test_a_tensor_that_the_forward_leaves_cannot_be_used() -> None:
    watching = Watching(Writing(leaves_a_tensor))
    watching.program()
    assert isinstance(watching.model.last, NotKept)
    with pytest.raises(StateError, match="'last' of the model is set by the forward"):
        watching.model.last.mean()
    watching.model.layer.eval()
    watching.program()
    with pytest.raises(StateError, match="set by the forward"):
        torch.stack([watching.model.last])


def test_a_number_that_the_forward_leaves_is_there() -> None:
    watching = Watching(Writing(leaves_a_number))
    watching.program()
    assert watching.model.last == 2


def test_what_a_module_of_the_loss_has_in_its_slots_is_read() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(2))
    watching = Watching(nn.Linear(3, 2), lambda output, **batch: criterion(output, torch.zeros(4, dtype=torch.int64)))
    first = watching.programs.find({"input": torch.ones(4, 3)}, True)
    assert watching.programs.find({"input": torch.ones(4, 3)}, True) is first
    criterion.weight = torch.ones(2)
    assert watching.programs.find({"input": torch.ones(4, 3)}, True) is not first


def test_another_forward_of_the_models_class_is_captured() -> None:
    class Own(Guarded):
        pass

    watching = Watching(Own())
    first = watching.program()
    Own.forward = lambda self, x: self.layer(x)  # type: ignore[method-assign]
    assert watching.program() is not first
    assert "'forward' of the model's class" in watching.why


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 2, num_layers=2, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x[None])[0]


def test_what_a_recurrent_layer_lists_of_its_parameters_is_no_state_of_the_forward() -> None:
    watching = Watching(Recurrent())
    first = watching.program()
    assert watching.program() is first
    cell = watching.model.cell
    assert all(listed is held for listed, held in zip(cell._flat_weights, cell.parameters(), strict=True))
    cell.weight_ih_l0.requires_grad_(False)
    assert watching.program() is not first
