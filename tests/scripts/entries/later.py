"""What scripts change in the course of training: schedules, adapters, settings of all kinds, hooks of tensors."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from tests.scripts.job import Job, Made, loss_of
from tests.scripts.models import CLASSES, FEATURES, HIDDEN
from tests.scripts.script import Results, script
from tests.scripts.training import batches, sgd, step

_VARIABLE = "SCRIPTS_SCALE"
_SCALE = 1.0
Reader = Callable[[Any], Any]


class Options:
    """A class that is never made into an object: many scripts keep their settings so."""

    scale = 1.0


class _Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class _Reading(nn.Module):
    """Scales what it computes by what a function of the model gives."""

    def __init__(self, read: Reader) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.read = read

    @property
    def global_scale(self) -> float:
        return _SCALE

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.first(x)) * self.read(self))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _reading(read: Reader) -> Made:
    torch.manual_seed(0)
    return _Reading(read).double(), batches(1)[0]


def _around(job: Job, made: Made, *changes: Callable[[Any], Any], **options: Any) -> Results:
    """Train a step, and two after each change."""
    model, batch = made
    job.parallel(model, batch, **options)
    losses = [step(job, model, batch, sgd(model))]
    for change in changes:
        change(model)
        optimizer = sgd(model)
        losses += [step(job, model, batch, optimizer) for _ in range(2)]
    return {"losses": losses, **job.parameters(model), **job.buffers(model)}


def _reads(
    name: str, read: Reader, prepare: Callable[[Any], Any], change: Callable[[Any], Any], **options: Any
) -> None:
    """Enter a forward that reads something, which is prepared, and changed after a step."""

    @script(f"reads {name}, which changes", **options)
    def _(job: Job) -> Results:
        model, batch = _reading(read)
        prepare(model)
        return _around(job, (model, batch), change)


def _set(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda model: setattr(model, name, value)


def _set_global(value: float) -> None:
    global _SCALE
    _SCALE = value


def _nothing(model: Any) -> None:
    pass


_reads("a setting of a class", lambda m: Options.scale, lambda m: _set_class(1.0), lambda m: _set_class(2.0))
_reads("a global number", lambda m: _SCALE, lambda m: _set_global(1.0), lambda m: _set_global(2.0))
_reads(
    "a global number by a property", lambda m: m.global_scale, lambda m: _set_global(1.0), lambda m: _set_global(2.0)
)
_reads(
    "numbers of the default dtype",
    lambda m: torch.full((1,), 2.0**24 + 1).double() - (2.0**24 - 1),
    _nothing,
    lambda m: torch.set_default_dtype(torch.float64),
)
_reads(
    "an environment variable",
    lambda m: float(os.environ.get(_VARIABLE, "1.0")),
    lambda m: os.environ.pop(_VARIABLE, None),
    lambda m: os.environ.update({_VARIABLE: "2.0"}),
)
_reads(
    "a value that processes share",
    lambda m: m.shared.value,
    lambda m: _set("shared", multiprocessing.Value("d", 1.0))(m),
    lambda m: setattr(m.shared, "value", 2.0),
)
_reads(
    "an array of numpy",
    lambda m: float(m.array[0]),
    lambda m: _set("array", numpy.ones(2))(m),
    lambda m: m.array.fill(2.0),
)
_reads(
    "a number of numpy", lambda m: float(m.number), _set("number", numpy.float64(1.0)), _set("number", numpy.float64(2))
)
_reads(
    "a queue",
    lambda m: sum(m.recent) / len(m.recent),
    lambda m: _set("recent", collections.deque([1.0], maxlen=4))(m),
    lambda m: m.recent.append(2.0),
)
_reads(
    "a counter",
    lambda m: m.counter["a"],
    lambda m: _set("counter", collections.Counter(a=1))(m),
    lambda m: m.counter.update("a"),
)
_reads(
    "a tensor, written through .data,",
    lambda m: m.table[0],
    lambda m: _set("table", torch.ones(2, dtype=torch.float64))(m),
    lambda m: m.table.data.fill_(2.0),
)
_reads(
    "a buffer, written through .data,",
    lambda m: m.table[0],
    lambda m: m.register_buffer("table", torch.ones(2, dtype=torch.float64)),
    lambda m: m.table.data.fill_(2.0),
)
_reads("its own mode", lambda m: 1.0 if m.last.training else 2.0, _nothing, lambda m: m.last.eval())
_reads(
    "whether a parameter is trained",
    lambda m: 1.0 + m.first.bias.requires_grad,
    _nothing,
    lambda m: m.first.bias.requires_grad_(False),
)
_reads("whether a module is there", lambda m: 1.0 + hasattr(m, "extra"), _nothing, _set("extra", nn.Identity()))
_reads(
    "the number of its modules",
    lambda m: len(list(m.children())),
    _nothing,
    lambda m: m.add_module("more", nn.Identity()),
)
_reads(
    "random numbers of Python",
    lambda m: random.random(),
    lambda m: random.seed(3),
    _nothing,
    refused="draws random numbers",
)
_reads(
    "random numbers of numpy", lambda m: numpy.random.rand(), lambda m: numpy.random.seed(3), _nothing, refused="random"
)


def _set_class(value: float) -> None:
    Options.scale = value


@script("anneals a temperature before every step")
def _(job: Job) -> Results:
    model, batch = _reading(lambda m: m.temperature)
    model.temperature = 1.0  # type: ignore[assignment]
    job.parallel(model, batch)
    optimizer, losses = sgd(model), []
    for number in range(5):
        model.temperature = 1.0 / (1 + number)  # type: ignore[assignment]
        losses.append(step(job, model, batch, optimizer))
    return {"losses": losses, **job.parameters(model)}


@script("drops layers by Python's random numbers", refused="draws random numbers")
def _(job: Job) -> Results:
    random.seed(0)
    torch.manual_seed(0)

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(6))
            self.last = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            for layer in self.layers:
                if not self.training or random.random() < 0.5:
                    x = x + torch.tanh(layer(x))
            logits = self.last(x)
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    model, batch = Dropping().double(), batches(1)[0]
    job.parallel(model, batch)
    random.seed(1)
    optimizer = sgd(model)
    return {"losses": [step(job, model, batch, optimizer) for _ in range(4)]}


@script("unfreezes a layer in each epoch, with another optimizer group")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model.requires_grad_(False)
    model.last.requires_grad_(True)
    job.parallel(model, batch)
    optimizer = torch.optim.AdamW(model.last.parameters(), lr=1e-2)
    losses = [step(job, model, batch, optimizer)]
    for layer in (model.middle, model.first):
        layer.requires_grad_(True)
        optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
        losses += [step(job, model, batch, optimizer) for _ in range(2)]
    return {"losses": losses, **job.parameters(model)}


class _Adapter(nn.Module):
    """A linear layer with a low-rank addition, which can be left out or be merged."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.enabled, self.merged = base, True, False
        base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64) * 0.3)
        self.b = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.float64) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + x @ self.a.T @ self.b.T if self.enabled and not self.merged else y

    @torch.no_grad()
    def merge(self, sign: float) -> None:
        self.base.weight.data += sign * (self.b @ self.a)
        self.merged = sign > 0


def _adapted(job: Job) -> Made:
    model, batch = job.mlp()
    torch.manual_seed(1)
    model.middle = _Adapter(model.middle)
    return model, batch


@script("disables low-rank adapters within a block, and enables them again")
def _(job: Job) -> Results:
    model, batch = _adapted(job)
    job.parallel(model, batch)
    optimizer, losses = sgd(model), list[float]()

    @contextlib.contextmanager
    def disabled() -> Iterator[None]:
        model.middle.enabled = False
        try:
            yield
        finally:
            model.middle.enabled = True

    for _ in range(2):
        losses.append(step(job, model, batch, optimizer))
        with torch.no_grad(), disabled():
            losses.append(float(loss_of(model(**job.rows(batch)))))
    return {"losses": losses, **job.parameters(model)}


@script("merges low-rank adapters to evaluate, and takes them out again")
def _(job: Job) -> Results:
    model, batch = _adapted(job)
    job.parallel(model, batch)
    optimizer = sgd(model)
    losses = [step(job, model, batch, optimizer)]
    model.middle.merge(1.0)
    model.eval()
    with torch.no_grad():
        losses.append(float(loss_of(model(**job.rows(batch)))))
    model.train()
    model.middle.merge(-1.0)
    losses.append(step(job, model, batch, optimizer))
    return {"losses": losses, **job.parameters(model)}


@script("evaluates within a block that brings the mode back")
def _(job: Job) -> Results:
    model, batch = job.conv()

    @contextlib.contextmanager
    def evaluating() -> Iterator[None]:
        modes = {module: module.training for module in model.modules()}
        model.train(False)
        try:
            with torch.inference_mode():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    model.stem[1].eval()
    job.parallel(model, batch)
    optimizer, losses = sgd(model), list[float]()
    for _ in range(2):
        losses.append(step(job, model, batch, optimizer))
        with evaluating():
            losses.append(float(loss_of(model(**job.rows(batch)))))
    return {"losses": losses, **job.parameters(model), **job.buffers(model)}


def _weighs(name: str, change: Callable[[nn.CrossEntropyLoss], Any]) -> None:
    @script(f"weighs classes from an epoch on: {name}")
    def _(job: Job) -> Results:
        model, batch = job.mlp()
        criterion = nn.CrossEntropyLoss(weight=torch.ones(CLASSES, dtype=torch.float64))

        def loss_fn(output: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
            return criterion(output["logits"], labels)

        job.parallel(model, batch, loss_fn=loss_fn)
        optimizer, losses = sgd(model), list[float]()
        for number in range(3):
            rows = job.rows(batch)
            output = model(**rows)
            loss = loss_fn(output, **rows) if job.is_plain else output.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if number == 0:
                change(criterion)
        return {"losses": losses, **job.parameters(model)}


_WEIGHTS = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
_weighs("another tensor", lambda criterion: setattr(criterion, "weight", _WEIGHTS))
_weighs("written in place", lambda criterion: criterion.weight.copy_(_WEIGHTS))  # type: ignore[union-attr]


@script("writes another forward into the model's class after the call")
def _(job: Job) -> Results:
    class Own(_Reading):
        pass

    def forward(self: Any, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.last(torch.sin(self.first(x)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    made = Own(lambda m: 1.0).double(), batches(1)[0]
    return _around(job, made, lambda model: setattr(Own, "forward", forward))


@script("makes a layer one of another class")
def _(job: Job) -> Results:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    return _around(job, job.mlp(), lambda model: setattr(model.middle, "__class__", Doubled))


@script("starts a layer anew after the call")
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        torch.manual_seed(4)
        model.middle.reset_parameters()
        nn.init.zeros_(model.last.bias)

    return _around(job, job.mlp(), change)


@script("makes a weight orthogonal after the call", refused="cannot be done to a home tensor")
def _(job: Job) -> Results:
    return _around(job, job.mlp(), lambda model: nn.init.orthogonal_(model.last.weight))


@script("lets hooks of parameters change gradients, and takes them away")
def _(job: Job) -> Results:
    handles: list[Any] = []
    return _around(
        job,
        job.mlp(),
        lambda model: handles.append(model.middle.weight.register_hook(lambda gradient: gradient * 0.5)),
        lambda model: handles.pop().remove(),
    )


@script("adds spectral norm in the old way", tolerance=1e-8)
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        torch.manual_seed(2)
        nn.utils.spectral_norm(model.middle)

    return _around(job, job.mlp(), change)


@script("adds weight norm in the old way, and takes it away", refused="as torch.nn.utils.weight_norm does")
def _(job: Job) -> Results:
    return _around(
        job,
        job.mlp(),
        lambda model: nn.utils.weight_norm(model.middle),
        lambda model: nn.utils.remove_weight_norm(model.middle),
    )


@script("computes parametrizations once for several calls")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    parametrizations.weight_norm(model.middle)
    job.parallel(model, batch)
    optimizer, losses = sgd(model), list[float]()
    for _ in range(2):
        with parametrize.cached():
            losses.append(step(job, model, batch, optimizer))
    return {"losses": losses, **job.parameters(model)}


@script("turns gradient checkpointing on and the cache off after the call", tolerance=1e-6)
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        model.gradient_checkpointing_enable()
        model.config.use_cache = False

    return _around(job, job.llama(), change, lambda model: model.gradient_checkpointing_disable())


@script("asks a transformer's configuration for other attention", tolerance=1e-6)
def _(job: Job) -> Results:
    return _around(job, job.llama(), lambda model: model.set_attn_implementation("eager"))


@script("takes the head off to use the features")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = [step(job, model, batch, sgd(model))]
    model.last = nn.Identity()
    model.eval()
    with torch.no_grad():
        features = model(x=job.rows(batch)["x"])["logits"]
    return {"losses": losses, "features": job.gathered(features)}


@script("drops layers off the end of a transformer", tolerance=1e-6)
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        model.model.layers = model.model.layers[:1]

    return _around(job, job.llama(), change)


@script("swaps the order of layers")
def _(job: Job) -> Results:
    torch.manual_seed(0)

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
            self.last = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return {"loss": functional.cross_entropy(self.last(x), labels)}

    def change(model: Any) -> None:
        model.layers[0], model.layers[2] = model.layers[2], model.layers[0]

    return _around(job, (Stacked().double(), batches(1)[0]), change)


@script("calls a submodule of the model by itself")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    losses = [step(job, model, batch, sgd(model))]
    with torch.no_grad():
        made = model.first(job.rows(batch)["x"])
    return {"losses": losses, "made": job.gathered(made)}


_reads(
    "a setting of an object in a list",
    lambda m: m.options[0].scale,
    lambda m: _set("options", [_Scaled(1.0)])(m),
    lambda m: setattr(m.options[0], "scale", 2.0),
)
_reads(
    "a setting of a module in a list",
    lambda m: m.others[0].negative_slope,
    lambda m: _set("others", [nn.LeakyReLU(1.0)])(m),
    lambda m: setattr(m.others[0], "negative_slope", 2.0),
)
_reads(
    "a number out of a tensor",
    lambda m: m.table[0].item(),
    lambda m: _set("table", torch.ones(2, dtype=torch.float64))(m),
    lambda m: m.table.fill_(2.0),
)
_reads(
    "a set",
    lambda m: float(len(m.names)),
    lambda m: _set("names", {"a"})(m),
    lambda m: m.names.add("b"),
)
_reads(
    "a list in a tuple",
    lambda m: m.pairs[0][0],
    lambda m: _set("pairs", ([1.0], 1.0))(m),
    lambda m: m.pairs[0].__setitem__(0, 2.0),
)
_reads(
    "a generator of its own",
    lambda m: m.generator.random(),
    lambda m: _set("generator", random.Random(3))(m),
    _nothing,
    refused="keeps state in Python",
)


@script("has a loss function that is a module, whose smoothing changes")
def _(job: Job) -> Results:
    class Smoothed(nn.CrossEntropyLoss):
        def forward(self, output: Any, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(output["logits"], labels)

    model, batch = job.mlp()
    criterion = Smoothed()
    job.parallel(model, batch, loss_fn=criterion)
    optimizer, losses = sgd(model), list[float]()
    for smoothing in (0.0, 0.2):
        criterion.label_smoothing = smoothing
        rows = job.rows(batch)
        output = model(**rows)
        loss = criterion(output, **rows) if job.is_plain else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(model)}


class _Given(nn.Module):
    """Takes numbers of any dtype, of two or three dims, and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, labels: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
        if not x.is_floating_point():
            x = self.table(x)
        if x.dim() == 3:
            x = torch.tanh(x).sum(1)
        return {"loss": functional.cross_entropy(self.last(x) * factor, labels)}


def _later_batch(name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Train a step, and two on batches of another form."""

    @script(f"passes {name} in a later step")
    def _(job: Job) -> Results:
        torch.manual_seed(0)
        model, batch = _Given().double(), dict[str, Any](batches(1)[0])
        job.parallel(model, batch)
        optimizer, losses = sgd(model), list[float]()
        for given in (batch, change(batch), batch):
            tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
            loss = loss_of(model(**{**given, **job.rows(tensors)}))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return {"losses": losses, **job.parameters(model)}


_later_batch("another plain value", lambda batch: {**batch, "factor": 2.0})
_later_batch("inputs of more dims", lambda batch: {**batch, "x": torch.stack([batch["x"], batch["x"] ** 2], 1)})
_later_batch("inputs of another dtype", lambda batch: {**batch, "x": (batch["x"].abs() * 3).long().clamp(max=9)})


@script("passes another number of steps to a forward that loops over them")
def _(job: Job) -> Results:
    class Looping(_Given):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            state = torch.zeros_like(x[:, 0])
            for at in range(x.shape[1]):
                state = torch.tanh(state + x[:, at])
            return {"loss": functional.cross_entropy(self.last(state), labels)}

    torch.manual_seed(0)
    model, batch = Looping().double(), batches(1)[0]
    steps = {count: {**batch, "x": torch.stack([batch["x"] / (1 + at) for at in range(count)], 1)} for count in (2, 3)}
    job.parallel(model, steps[2])
    optimizer = sgd(model)
    return {"losses": [step(job, model, steps[count], optimizer) for count in (2, 3, 2)], **job.parameters(model)}
