"""What scripts change of a model after the call: modes, attributes, what is trained, modules, parameters, hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.scripts.job import Job, Made, loss_of
from tests.scripts.script import Results, script
from tests.scripts.training import batches, sgd, step


def _both(job: Job, made: Made, change: Callable[[Any], Any], back: Callable[[Any], Any] | None = None) -> Results:
    """Train a step, change the model, train two; if it is changed back, another."""
    model, batch = made
    job.parallel(model, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [step(job, model, batch, optimizer)]
    change(model)
    losses += [step(job, model, batch, optimizer) for _ in range(2)]
    if back is not None:
        back(model)
        losses.append(step(job, model, batch, optimizer))
    return {"losses": losses, **job.parameters(model), **job.buffers(model)}


@script("freezes a BatchNorm after the call, and lets it go again")
def _(job: Job) -> Results:
    return _both(job, job.conv(), lambda model: model.stem[1].eval(), lambda model: model.stem[1].train())


@script("freezes every BatchNorm before the call and in every epoch, as detection code does")
def _(job: Job) -> Results:
    model, batch = job.conv()

    def train() -> None:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()

    train()
    job.parallel(model, batch)
    optimizer = sgd(model)
    losses = [step(job, model, batch, optimizer)]
    model.eval()
    with torch.no_grad():
        losses.append(float(loss_of(model(**job.rows(batch)))))
    train()
    losses.append(step(job, model, batch, optimizer))
    return {"losses": losses, **job.parameters(model), **job.buffers(model)}


@script("changes a BatchNorm's momentum, as EMA schedules do")
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        model.stem[1].momentum = 0.01

    return _both(job, job.conv(), change)


@script("puts a dropout in after the call, and sets its rate to zero")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model.dropout.p = 0.5
    job.parallel(model, batch)
    model.dropout.p = 0.0
    optimizer = sgd(model)
    return {"losses": [step(job, model, batch, optimizer) for _ in range(2)], **job.parameters(model)}


@script("changes an attribute that the forward reads, and back")
def _(job: Job) -> Results:
    return _both(job, job.mlp(), lambda model: setattr(model, "scale", 3.0), lambda model: setattr(model, "scale", 1.0))


@script("changes a value of a Hugging Face configuration", tolerance=1e-6)
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.scaling *= 0.5
        model.config.use_cache = False

    return _both(job, job.llama(), change)


class _Configured(nn.Module):
    """Reads an object, a list, a dictionary, a class attribute and what a property makes of them."""

    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 24), nn.Linear(24, 5)
        self.config = SimpleNamespace(alpha=1.0)
        self.settings = _Settings()
        self.weights = [1.0, 0.5]
        self.table = {"slope": 0.1, "nested": {"bias": 0.2}}

    @property
    def factor(self) -> float:
        return self.settings.beta * self.power

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = nn.functional.leaky_relu(self.first(x) * self.config.alpha, self.table["slope"])
        hidden = hidden * self.weights[0] + hidden**2 * self.weights[1] + self.table["nested"]["bias"]
        logits = self.last(hidden) * self.factor + _GLOBAL["shift"] + getattr(self, "extra", 0.0)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class _Settings:
    def __init__(self) -> None:
        self.beta = 1.0


_GLOBAL = {"shift": 0.0}


def _configured() -> Made:
    torch.manual_seed(0)
    return _Configured().double(), batches(1)[0]


def _changes(name: str, change: Callable[[Any], Any]) -> None:
    @script(f"changes {name} that the forward reads")
    def _(job: Job) -> Results:
        _GLOBAL["shift"], _Configured.power = 0.0, 1.0
        return _both(job, _configured(), change)


_changes("a value of a namespace", lambda model: setattr(model.config, "alpha", 2.0))
_changes("the namespace", lambda model: setattr(model, "config", SimpleNamespace(alpha=0.5)))
_changes("a field of an object of its own class", lambda model: setattr(model.settings, "beta", 2.0))
_changes("an entry of a list", lambda model: model.weights.__setitem__(1, 0.0))
_changes("an entry of a dictionary in a dictionary", lambda model: model.table["nested"].update(bias=1.0))
_changes("an attribute of its class", lambda model: setattr(_Configured, "power", 0.5))
_changes("a global", lambda model: _GLOBAL.update(shift=torch.arange(5.0).tolist()[1]))
_changes("an attribute that was not there", lambda model: setattr(model, "extra", 0.25))


@script("changes the label smoothing of a loss function that is a module")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    criterion = nn.CrossEntropyLoss()

    def loss_fn(output: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
        return criterion(output["logits"], labels)

    job.parallel(model, batch, loss_fn=loss_fn)
    optimizer, losses = sgd(model), []
    for smoothing in (0.0, 0.2):
        criterion.label_smoothing = smoothing
        rows = job.rows(batch)
        output = model(**rows)
        loss = loss_fn(output, **rows) if job.is_plain else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(model)}


@script("counts steps in an attribute outside of the forward, without another capture")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer: Any = sgd(model)
    counted: Any = model
    counted.steps_done = 0
    for _ in range(3):
        step(job, model, batch, optimizer)
        counted.steps_done += 1
    captures = 1 if job.is_plain else len(counted.hetu.stats["captures"])
    return {"captures": captures, "steps": counted.steps_done, **job.parameters(model)}


@script("unfreezes a parameter after some steps, as gradual unfreezing does")
def _(job: Job) -> Results:
    return _both(job, job.mlp(), lambda model: model.first.bias.requires_grad_(True))


@script("freezes a part of the model after some steps, and lets it go again")
def _(job: Job) -> Results:
    return _both(
        job, job.mlp(), lambda model: model.first.requires_grad_(False), lambda model: model.first.requires_grad_(True)
    )


@script("unfreezes the last layer of a transformer only", tolerance=1e-5)
def _(job: Job) -> Results:
    model, batch = job.llama()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    job.parallel(model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = [step(job, model, batch, optimizer)]
    model.model.layers[-1].requires_grad_(True)
    losses += [step(job, model, batch, optimizer) for _ in range(2)]
    return {"losses": losses, **job.parameters(model)}


def _doubles(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output * 2


def _halves(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given[0] * 0.5,)


@script("registers a forward hook that changes a submodule's output, and removes it")
def _(job: Job) -> Results:
    handles: list[Any] = []
    return _both(
        job,
        job.mlp(),
        lambda model: handles.append(model.middle.register_forward_hook(_doubles)),
        lambda model: handles.pop().remove(),
    )


@script("registers a forward pre-hook that changes a submodule's input")
def _(job: Job) -> Results:
    return _both(job, job.mlp(), lambda model: model.middle.register_forward_pre_hook(_halves))


@script("has a forward hook that changes a submodule's output before the call")
def _(job: Job) -> Results:
    made = job.mlp()
    made[0].middle.register_forward_hook(_doubles)
    return _both(job, made, lambda model: None)


@script("registers hooks on the model itself before the call, which torch runs around the step")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    seen: list[float] = []

    def scaled(module: nn.Module, given: Any, output: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(1.0)
        return {**output, "loss": output["loss"] * 3}

    model.register_forward_hook(scaled)
    made = _both(job, (model, batch), lambda model: None)
    return {**made, "calls": len(seen)}


@script("registers a forward hook that only looks", refused="only looks")
def _(job: Job) -> Results:
    seen: list[Any] = []
    return _both(job, job.mlp(), lambda model: model.middle.register_forward_hook(lambda *given: seen.append(1)))


@script("registers a backward hook on a submodule", refused="has a backward hook")
def _(job: Job) -> Results:
    return _both(job, job.mlp(), lambda model: model.middle.register_full_backward_hook(lambda *given: None))


@script("registers a hook for all modules", refused="registered for all modules")
def _(job: Job) -> Results:
    handles: list[Any] = []

    def change(model: nn.Module) -> None:
        handles.append(nn.modules.module.register_module_forward_hook(lambda *given: None))

    try:
        return _both(job, job.mlp(), change)
    finally:
        handles.pop().remove()


class _Counting(nn.Module):
    """Counts its calls in Python, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(10, 5), 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return {"loss": nn.functional.cross_entropy(self.layer(x) / self.calls, labels)}


@script("has a forward that counts its calls in Python", refused="keeps state in Python")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    return _both(job, (_Counting().double(), batches(1)[0]), lambda model: None)


class _Collecting(_Counting):
    """Collects what it has seen in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        self.seen.append(logits.detach())
        return {"loss": nn.functional.cross_entropy(logits, labels)}


@script("has a forward that appends to a list", refused="keeps state in Python")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    return _both(job, (_Collecting().double(), batches(1)[0]), lambda model: None)


class _Leaving(_Counting):
    """Leaves its logits in an attribute, which it does not read."""

    last: Tensor

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.last = self.layer(x)
        return {"loss": nn.functional.cross_entropy(self.last, labels)}


@script("trains a model whose forward leaves a tensor in an attribute for itself")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    return _both(job, (_Leaving().double(), batches(1)[0]), lambda model: None)


@script("reads a tensor that the forward has left in an attribute", refused="is set by the forward")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    model, batch = _Leaving().double(), batches(1)[0]
    job.parallel(model, batch)
    step(job, model, batch, sgd(model))
    return {"mean": float(model.last.mean())}


class _Branching(_Counting):
    """Branches on a value."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        if logits.mean() > 0:
            logits = logits * 2
        return {"loss": nn.functional.cross_entropy(logits, labels)}


@script("has a forward that branches on a value", refused="cannot capture the model at guards.py")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    return _both(job, (_Branching().double(), batches(1)[0]), lambda model: None)


@script("patches a submodule's forward")
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        before = model.middle.forward
        model.middle.forward = lambda x: before(x) * 0.5

    return _both(job, job.mlp(), change)


@script("changes the model on one rank only", refused="on rank", settings=("dp2", "tp2"))
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        model.scale = 1.0 + job.rank

    return _both(job, job.mlp(), change)


def _replaces(name: str, change: Callable[[Any], Any], make: Callable[[Job], Made] = Job.mlp) -> None:
    """Train a step, change what the model consists of, and train on with an optimizer for what it has then."""

    @script(name)
    def _(job: Job) -> Results:
        model, batch = make(job)
        job.parallel(model, batch)
        losses = [step(job, model, batch, sgd(model))]
        torch.manual_seed(5)
        change(model)
        optimizer = sgd(model)
        losses += [step(job, model, batch, optimizer) for _ in range(3)]
        return {"losses": losses, **job.parameters(model), **job.gradients(model), **job.buffers(model)}


def _new_head(model: Any) -> None:
    model.last = nn.Linear(24, 5).double()


def _new_value(model: Any) -> None:
    model.middle.weight = nn.Parameter(torch.randn(24, 24).double())


def _more_classes(model: Any) -> None:
    model.last = nn.Linear(24, 9).double()


def _tied(model: Any) -> None:
    model.last = nn.Linear(24, 24, bias=False).double()
    model.last.weight = model.middle.weight


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class _Adapted(nn.Module):
    """A linear layer and a product of two thin ones beside it, as LoRA has it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False).double()
        self.up = nn.Linear(rank, base.out_features, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _adapters(model: Any) -> None:
    model.requires_grad_(False)
    model.middle = _Adapted(model.middle)


def _resized(model: Any) -> None:
    model.insert = nn.BatchNorm1d(24).double()
    model.dropout = model.insert


_replaces("replaces the head by one of the same size", _new_head)
_replaces("replaces the head by one with more classes", _more_classes)
_replaces("assigns a new parameter to a layer", _new_value)
_replaces("ties two weights after the call", _tied)
_replaces("puts adapters into the model and freezes the rest", _adapters)
_replaces("puts a batch norm in the place of a dropout", _resized)
_replaces("drops a bias", lambda model: setattr(model.middle, "bias", None))
_replaces("replaces an activation", lambda model: setattr(model, "dropout", nn.Tanh()))
_replaces("adds weight norm", lambda model: parametrizations.weight_norm(model.middle))
_replaces("adds spectral norm", lambda model: parametrizations.spectral_norm(model.middle))
_replaces(
    "adds a parametrization of its own",
    lambda model: parametrize.register_parametrization(model.middle, "weight", _Symmetric()),
)
_replaces("prunes a layer by magnitude", lambda model: prune.l1_unstructured(model.middle, "weight", amount=0.3))


@script("replaces an activation by one of another sharpness")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    model.dropout = nn.Softplus(beta=1.0)
    return _both(job, (model, batch), lambda model: setattr(model, "dropout", nn.Softplus(beta=4.0)))


@script("replaces the head and gives its parameters to the optimizer that there is")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = sgd(model)
    losses = [step(job, model, batch, optimizer)]
    torch.manual_seed(5)
    _new_head(model)
    optimizer.add_param_group({"params": model.last.parameters()})
    losses += [step(job, model, batch, optimizer) for _ in range(3)]
    return {"losses": losses, **job.parameters(model)}


@script("replaces the head with other random numbers on each rank: the first one's count")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    torch.manual_seed(5 + job.rank)
    _new_head(model)
    optimizer = sgd(model)
    return {"losses": [step(job, model, batch, optimizer) for _ in range(2)], **job.parameters(model)}


@script("takes weight norm away again")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    parametrizations.weight_norm(model.middle)
    job.parallel(model, batch)
    losses = [step(job, model, batch, sgd(model))]
    parametrize.remove_parametrizations(model.middle, "weight")
    optimizer = sgd(model)
    losses += [step(job, model, batch, optimizer) for _ in range(2)]
    return {"losses": losses, **job.parameters(model)}


@script("replaces a buffer")
def _(job: Job) -> Results:
    def change(model: Any) -> None:
        model.stem[1].running_mean = torch.full_like(model.stem[1].running_mean, 0.5)

    return _both(job, job.conv(), change)


@script("puts the old head back")
def _(job: Job) -> Results:
    heads: list[Any] = []

    def change(model: Any) -> None:
        torch.manual_seed(5)
        heads.append(model.last)
        _new_head(model)

    return _both(job, job.mlp(), change, lambda model: setattr(model, "last", heads[0]))


@script("unties the embeddings of a transformer after the call", tolerance=1e-6)
def _(job: Job) -> Results:
    model, batch = job.llama(tie_word_embeddings=True)
    job.parallel(model, batch)
    losses = [step(job, model, batch, sgd(model))]
    torch.manual_seed(5)
    model.lm_head.weight = nn.Parameter(torch.randn(model.lm_head.weight.shape).double() * 0.1)
    optimizer = sgd(model)
    losses += [step(job, model, batch, optimizer) for _ in range(2)]
    return {"losses": losses, **job.parameters(model)}


@script("observes what a submodule makes, in training and in evaluation, and stops")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    seen: list[Tensor] = []
    if job.is_plain:
        handle: Any = model.middle.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    else:
        handle = model.hetu.observe("middle", seen.append)  # type: ignore[operator, union-attr]
    optimizer = sgd(model)
    losses = [step(job, model, batch, optimizer) for _ in range(2)]
    model.eval()
    with torch.no_grad():
        losses.append(float(loss_of(model(**job.rows(batch)))))
    model.train()
    handle.remove()
    losses.append(step(job, model, batch, optimizer))
    return {"losses": losses, "seen": torch.stack([job.gathered(one) for one in seen]), **job.parameters(model)}


@script("observes a layer of a transformer", tolerance=1e-6)
def _(job: Job) -> Results:
    model, batch = job.llama()
    job.parallel(model, batch)
    seen: list[Any] = []
    if job.is_plain:
        model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    else:
        model.hetu.observe("model.layers.0.mlp", seen.append)  # type: ignore[operator, union-attr]
    optimizer = sgd(model)
    losses = [step(job, model, batch, optimizer) for _ in range(2)]
    return {"losses": losses, "seen": torch.stack([job.gathered(one) for one in seen])}


@script("observes a submodule that is not there", refused="there is no submodule 'body'", settings=("dp2",))
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    model.hetu.observe("body", print)  # type: ignore[operator, union-attr]
    return {}


def _eagerly(name: str, change: Callable[[Any], Any], make: Callable[[Job], Made] = Job.mlp) -> None:
    """Train the module as it is: a step, a change, and two more."""

    @script(f"{name}, with capture='eager'", settings=("one", "dp2", "dp4"))
    def _(job: Job) -> Results:
        model, batch = make(job)
        job.parallel(model, batch, capture="eager")
        losses = [step(job, model, batch, sgd(model))]
        torch.manual_seed(5)
        change(model)
        optimizer = sgd(model)
        losses += [step(job, model, batch, optimizer) for _ in range(2)]
        return {"losses": losses, **job.parameters(model)}


def _counting(job: Job) -> Made:
    torch.manual_seed(0)
    return _Counting().double(), batches(1)[0]


_eagerly("counts calls in Python", lambda model: None, _counting)
_eagerly("changes an attribute", lambda model: setattr(model, "scale", 3.0))
_eagerly("replaces the head", _new_head)
_eagerly("unfreezes a parameter", lambda model: model.first.bias.requires_grad_(True))
_eagerly("looks through a hook", lambda model: model.middle.register_forward_hook(lambda *given: None))
_eagerly("looks through a backward hook", lambda model: model.middle.register_full_backward_hook(lambda *given: None))
_eagerly("adds weight norm", lambda model: parametrizations.weight_norm(model.middle))
