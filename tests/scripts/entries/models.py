"""What forwards take, do and return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.scripts.job import Job
from tests.scripts.models import CLASSES, FEATURES, HIDDEN
from tests.scripts.script import Results, script
from tests.scripts.training import batches, in_double, sgd, steps


class _Base(nn.Module):
    """Two layers, for forwards to be written over."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.last = nn.Linear(HIDDEN, CLASSES)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))


def _built(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().train()


Losses = Callable[[Any, dict[str, Tensor]], Tensor]


def _trains(
    name: str, kind: type[nn.Module], call: Losses, example: Callable[[dict[str, Tensor]], Any], **options: Any
) -> None:
    """Enter a model, trained for two steps; `call` makes the loss of this rank's rows."""

    @script(name, **options)
    def _(job: Job) -> Results:
        model = _built(kind)
        first, second = batches(2)
        job.parallel(model, example(first))
        optimizer = sgd(model)
        losses = []
        for one in (first, second):
            loss = call(model, job.rows(one))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return {"losses": losses, **job.parameters(model), **job.buffers(model)}


class _Tuple(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.last(self.hidden(x))
        return functional.cross_entropy(logits, labels), logits


_trains("returns a tuple, the loss first", _Tuple, lambda m, b: m(**b)[0], dict)


@dataclass
class _Output:
    loss: Tensor
    logits: Tensor


class _Dataclass(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> _Output:
        logits = self.last(self.hidden(x))
        return _Output(functional.cross_entropy(logits, labels), logits)


_trains("returns a dataclass", _Dataclass, lambda m, b: m(**b).loss, dict)


class _Nested(_Base):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(self.last(self.hidden(batch["x"])), batch["labels"])


_trains("takes its batch as one dict", _Nested, lambda m, b: m(b), lambda b: (b,))


class _Listed(_Base):
    def forward(self, parts: list[Tensor], labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.last(self.hidden(parts[0] + parts[1])), labels)


def _parts(b: dict[str, Tensor]) -> dict[str, Any]:
    return {"parts": [b["x"], 2 * b["x"]], "labels": b["labels"]}


_trains("takes a list of tensors", _Listed, lambda m, b: m(**_parts(b)), _parts)


class _Flags(_Base):
    def forward(self, x: Tensor, labels: Tensor, scale: float = 1.0, kind: str = "sum", **others: Any) -> Tensor:
        logits = self.last(self.hidden(x)) * scale
        return functional.cross_entropy(logits, labels, reduction="mean") * (2.0 if kind == "double" else 1.0)


@script("passes numbers and words that change from call to call")
def _(job: Job) -> Results:
    model = _built(_Flags)
    first, second = batches(2)
    job.parallel(model, first)
    losses = []
    for scale, kind in ((1.0, "sum"), (0.5, "sum"), (0.5, "double"), (1.0, "sum")):
        loss = model(**job.rows(second), scale=scale, kind=kind)
        loss.backward()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.gradients(model)}


@script("passes a number as a tensor without dims")
def _(job: Job) -> Results:
    model = _built(_Flags)
    first, second = batches(2)
    job.parallel(model, {**first, "scale": torch.tensor(1.0).double()})
    losses = []
    for scale in (1.0, 0.25):
        loss = model(**job.rows(second), scale=torch.tensor(scale).double())
        loss.backward()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.gradients(model)}


class _Masked(_Base):
    def forward(self, x: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        losses = functional.cross_entropy(self.last(self.hidden(x)), labels, reduction="none")
        return losses.mean() if mask is None else (losses * mask).sum() / mask.sum()


@script("passes a mask in some calls and none in others")
def _(job: Job) -> Results:
    model = _built(_Masked)
    first, second = batches(2)
    mask = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1]).double()
    job.parallel(model, first)
    losses = []
    for batch in ({**first, "mask": mask}, second):
        loss = model(**job.rows(batch))
        loss.backward()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.gradients(model)}


class _Summed(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.last(self.hidden(x)), labels, reduction="sum")


@script("sums the loss over rows instead of taking its mean")
def _(job: Job) -> Results:
    model = _built(_Summed)
    (batch,) = batches(1)
    job.parallel(model, batch)
    loss = model(**job.rows(batch))
    loss.backward()
    # The contract of DistributedDataParallel: gradients are the mean over ranks of each one's own.
    share = 1 / job.world
    summed = torch.stack(job.everyones(loss.detach())).sum()
    scaled = {name: g if g is None or job.is_plain else g / share for name, g in job.gradients(model).items()}
    return {"loss": summed, **scaled}


class _Weighted(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weight = torch.arange(1, CLASSES + 1, dtype=x.dtype)
        return functional.cross_entropy(self.last(self.hidden(x)), labels, weight=weight, label_smoothing=0.1)


_trains("weighs classes in its loss", _Weighted, lambda m, b: m(**b), dict)


class _Counts(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(HIDDEN))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(x)
        with torch.no_grad():
            self.average.lerp_(hidden.mean(0), 0.1)
            self.calls.add_(1)
        return functional.cross_entropy(self.last(hidden - self.average), labels)


_trains("keeps an average of its activations in a buffer", _Counts, lambda m, b: m(**b), dict)


class _Checkpointed(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = checkpoint(self.hidden, x, use_reentrant=False)
        return functional.cross_entropy(self.last(hidden), labels)


_trains("computes activations again in backward (torch.utils.checkpoint)", _Checkpointed, lambda m, b: m(**b), dict)


class _Detached(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(x)
        with torch.no_grad():
            target = torch.sigmoid(self.last(hidden))
        gate = (hidden.detach() > 0.1).to(hidden.dtype)
        return functional.cross_entropy(self.last(hidden * gate), labels) + (target.mean(1) ** 2).mean()


_trains("detaches, and computes a part without gradients", _Detached, lambda m, b: m(**b), dict)


class _Tied(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, HIDDEN)
        self.last.weight = self.embed.weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.last(self.hidden(x) + self.embed((x[:, 0] > 0).long())), labels)


_trains("ties a weight of an embedding and the last layer", _Tied, lambda m, b: m(**b), dict)


class _Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(FEATURES, CLASSES), "b": nn.Linear(FEATURES, CLASSES)})

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + scale * torch.tanh(layer(x))
        return functional.cross_entropy(self.heads["a"](x) + self.heads["b"](x), labels)


_trains("has lists and dicts of modules and parameters", _Listing, lambda m, b: m(**b), dict)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, HIDDEN, batch_first=True)
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.cell(x.view(len(x), -1, 2))
        return functional.cross_entropy(self.last(states[:, -1]), labels)


_trains("runs a GRU", _Recurrent, lambda m, b: m(**b), dict)


class _TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(2, HIDDEN // 2, num_layers=2, bidirectional=True, batch_first=True)
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.cell(x.view(len(x), -1, 2))
        return functional.cross_entropy(self.last(states.mean(1)), labels)


_trains("runs an LSTM of two layers, both ways", _TwoWays, lambda m, b: m(**b), dict)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x * gradient  # not the derivative: whoever differentiates the forward is found out


class _OwnBackward(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.last(_Square.apply(self.hidden(x))), labels)


@script("has a function with a backward of its own", refused="whose backward is not the derivative")
def _(job: Job) -> Results:
    model = _built(_OwnBackward)
    (batch,) = batches(1)
    job.parallel(model, batch)
    loss = model(**job.rows(batch))
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(model)}


class _Branches(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if hidden.mean() > 0.1:
            hidden = hidden * 2
        return functional.cross_entropy(self.last(hidden), labels)


@script("branches on a value", refused="goes on either way")
def _(job: Job) -> Results:
    model = _built(_Branches)
    (batch,) = batches(1)
    job.parallel(model, batch)
    loss = model(**job.rows(batch))
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(model)}


class _Cosine(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = functional.normalize(self.hidden(x), dim=-1)
        weight = functional.normalize(self.last.weight, dim=-1)
        logits = 8.0 * functional.linear(hidden, weight)
        top = logits.topk(2, dim=-1).indices
        return {"loss": functional.cross_entropy(logits, labels), "right": (top == labels[:, None]).any(-1)}


_trains("reads the weight of a layer by itself", _Cosine, lambda m, b: m(**b)["loss"], dict)


class _Frozen(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.last(self.norm(self.hidden(x))), labels)


_trains("freezes a backbone before", _Frozen, lambda m, b: m(**b), dict)


class _Adversarial(_Base):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return functional.mse_loss(self.last(hidden).mean(1), x.mean(1)) + functional.l1_loss(hidden.mean(1), x[:, 0])


_trains("has two losses of regression", _Adversarial, lambda m, b: m(**b), dict)


class _Loop(_Base):
    """Reads its rows step by step, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        state = x.new_zeros(x.shape[0], HIDDEN)
        for at in range(x.shape[1]):
            state = torch.tanh(self.first(x[:, at]) + self.back(state))
        return {"loss": functional.cross_entropy(self.last(state), labels)}


@script("loops over the steps of its sequences, in batches of other lengths")
def _(job: Job) -> Results:
    model = _built(_Loop)
    made = [
        {**one, "x": torch.stack([one["x"]] * length, 1)} for length, one in zip((3, 5, 3), batches(3), strict=True)
    ]
    job.parallel(model, made[0])
    return {"losses": steps(job, model, made, sgd(model)), **job.parameters(model)}


class _Noisy(_Base):
    """Adds noise whose size it works out from those of its input, as NEFTune does."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        wide = self.hidden(x)[:, None].expand(-1, 500, -1)
        largest = 5.0 / torch.sqrt(torch.tensor(wide.size(1) * wide.size(2)))
        noise = torch.zeros_like(wide).uniform_(-largest, largest)
        return functional.cross_entropy(self.last(wide + noise).mean(1), labels) + 1e3 * noise.square().mean()


# Other numbers are drawn than on one device, as many and as large.
_trains("adds noise of a size that follows from that of its input", _Noisy, lambda m, b: m(**b), dict, tolerance=3e-2)


@script("trains in single precision", tolerance=1e-4)
def _(job: Job) -> Results:
    model = _built(_Tuple).float()
    (batch,) = batches(1)
    batch = {"x": batch["x"].float(), "labels": batch["labels"]}
    job.parallel(model, batch)
    loss = model(**job.rows(batch))[0]
    loss.backward()
    return {"loss": loss.detach(), **job.gradients(model)}


@script("trains a vision transformer and an encoder-decoder in turns")
def _(job: Job) -> Results:
    found: dict[str, Any] = {}
    for name in ("vit", "t5"):
        model, batch = job.zoo(name)
        job.parallel(model, batch)
        loss = model(**job.rows(in_double(batch))).loss
        loss.backward()
        found[f"{name} loss"] = loss.detach()
        found[f"{name} gradient"] = next(iter(job.gradients(model).values()))
    return found


@script("keeps weak references to its parameters", refused="weak references")
def _(job: Job) -> Results:
    model = _built(_Tuple)
    (batch,) = batches(1)
    names = WeakKeyDictionary({parameter: name for name, parameter in model.named_parameters()})
    job.parallel(model, batch)
    return {"names": sorted(names.values())}
