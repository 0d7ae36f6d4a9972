"""Losses over pairs of rows: every row of the batch is compared with every other, wherever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from hetu_fx.plans.plan import Pipeline, Plan, Stage
from tests.scripts.job import Batch, Job, loss_of
from tests.scripts.script import Results, script
from tests.scripts.training import sgd, steps

FEATURES, HIDDEN, MADE = 12, 20, 10
Loss = Callable[..., Tensor]


class Encoder(nn.Module):
    """Makes a vector of length one of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, MADE)

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors of length one."""
        return normalize(self.down(torch.tanh(self.up(x))), dim=-1)


class Pairs(nn.Module):
    """Two encoders, and a loss of what they make of two views of each row, given as a function."""

    def __init__(self, loss: Loss, shared: bool = False) -> None:
        super().__init__()
        self.first = Encoder()
        self.second = self.first if shared else Encoder()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.bias = nn.Parameter(torch.tensor(-1.0))
        self.loss = loss

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        """Return the loss and the vectors."""
        u, v = self.first(a), self.second(b)
        return {"loss": self.loss(self, u, v), "u": u}


def _views(rows: int = 8) -> Batch:
    return {"a": torch.randn(rows, FEATURES).double(), "b": torch.randn(rows, FEATURES).double()}


def _labelled(rows: int = 8) -> Batch:
    return {"a": torch.randn(rows, FEATURES).double(), "labels": torch.arange(rows) % 3}


def _trained(job: Job, model: nn.Module, batches: list[Batch], **options: Any) -> Results:
    job.parallel(model, job.rows(batches[0]), **options)
    optimizer = sgd(model)
    losses = steps(job, model, batches[:2], optimizer)
    loss_of(model(**job.rows(batches[2]))).backward()
    return {"losses": losses, **job.gradients(model), **job.parameters(model)}


def _pairs(job: Job, loss: Loss, **options: Any) -> Results:
    torch.manual_seed(0)
    model = Pairs(loss).double()
    return _trained(job, model, [_views() for _ in range(3)], **options)


def _clip(model: Pairs, u: Tensor, v: Tensor) -> Tensor:
    scores = u @ v.t() * model.scale.exp()
    labels = torch.arange(len(scores))
    return (cross_entropy(scores, labels) + cross_entropy(scores.t(), labels)) / 2


def _info_nce(model: Pairs, u: Tensor, v: Tensor) -> Tensor:
    if len(u) != len(v):
        raise ValueError("views differ")
    scores = torch.einsum("id,jd->ij", u, v) / 0.1
    return cross_entropy(scores, torch.arange(len(u)))


def _sigmoid(model: Pairs, u: Tensor, v: Tensor) -> Tensor:
    scores = u @ v.t() * model.scale.exp() + model.bias
    signs = 2 * torch.eye(len(scores), dtype=scores.dtype) - 1
    return -logsigmoid(signs * scores).sum() / len(scores)


def _apart(model: Pairs, u: Tensor, v: Tensor) -> Tensor:
    distances = (u[:, None] - v[None]).square().sum(-1)
    own = torch.diagonal(distances)
    return torch.relu(own[:, None] - distances + 0.5).mean()


def _correlated(model: Pairs, u: Tensor, v: Tensor) -> Tensor:
    table = u.t() @ v / len(u)
    return (table - torch.eye(MADE, dtype=u.dtype)).square().sum()


def _with_rows_apart(model: Pairs, u: Tensor, v: Tensor) -> Tensor:
    return _clip(model, u, v) + 0.3 * (u - v).square().mean()


@script("trains a CLIP of its own")
def _(job: Job) -> Results:
    return _pairs(job, _clip)


@script("trains by InfoNCE, and compares lengths")
def _(job: Job) -> Results:
    return _pairs(job, _info_nce)


@script("trains by a sigmoid for each pair (SigLIP)")
def _(job: Job) -> Results:
    return _pairs(job, _sigmoid)


@script("trains on distances of all pairs")
def _(job: Job) -> Results:
    return _pairs(job, _apart)


@script("trains on the correlation over the batch (Barlow Twins)")
def _(job: Job) -> Results:
    return _pairs(job, _correlated)


@script("adds a loss of its rows to that of pairs")
def _(job: Job) -> Results:
    return _pairs(job, _with_rows_apart)


class SimCLR(nn.Module):
    """NT-Xent over both views of all rows, joined; a view's own scores are masked."""

    def __init__(self, masked: str = "fill") -> None:
        super().__init__()
        self.encoder = Encoder()
        self.masked = masked

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        rows = len(a)
        assert len(a) == len(b)
        made = self.encoder(torch.cat([a, b]))
        scores = made @ made.t() / 0.5
        own = torch.eye(2 * rows, dtype=torch.bool, device=scores.device)
        labels = torch.cat([torch.arange(rows) + rows, torch.arange(rows)])
        if self.masked == "fill":
            return {"loss": cross_entropy(scores.masked_fill(own, -1e9), labels)}
        first, second = made.chunk(2)
        pairs = torch.cat([(first * second).sum(-1), (second * first).sum(-1)]) / 0.5
        others = (scores.exp() * ~own).sum(-1)
        return {"loss": (others.log() - pairs).mean()}


@script("trains a SimCLR that joins its views")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    return _trained(job, SimCLR().double(), [_views() for _ in range(3)])


@script("trains a SimCLR that takes its views apart again")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    return _trained(job, SimCLR("sum").double(), [_views() for _ in range(3)])


class Labelled(nn.Module):
    """A loss of labelled rows, given as a function of vectors and labels."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.loss = loss

    def forward(self, a: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": self.loss(self.encoder(a), labels)}


def _supervised(made: Tensor, labels: Tensor) -> Tensor:
    scores = made @ made.t() / 0.3
    others = 1 - torch.eye(made.shape[0], dtype=made.dtype)
    alike = (labels[:, None] == labels[None]).to(made.dtype) * others
    scores = scores - scores.max(1, keepdim=True).values.detach()
    logs = scores - (scores.exp() * others).sum(1, keepdim=True).log()
    return -((alike * logs).sum(1) / alike.sum(1).clamp(min=1)).mean()


def _hardest(made: Tensor, labels: Tensor) -> Tensor:
    distances = (made[:, None] - made[None]).square().sum(-1)
    alike = labels[:, None] == labels[None]
    furthest = distances.masked_fill(~alike, 0).amax(1)
    nearest = distances.masked_fill(alike, 1e9).amin(1)
    return torch.relu(furthest - nearest + 1).mean()


def _labels(job: Job, loss: Loss) -> Results:
    torch.manual_seed(0)
    return _trained(job, Labelled(loss).double(), [_labelled() for _ in range(3)])


@script("trains by labels that pairs share (SupCon)")
def _(job: Job) -> Results:
    return _labels(job, _supervised)


@script("trains on the hardest triplets of the batch")
def _(job: Job) -> Results:
    return _labels(job, _hardest)


@script("compares all pairs by torch.cdist", refused="batch size is fixed")
def _(job: Job) -> Results:
    def loss(made: Tensor, labels: Tensor) -> Tensor:
        alike = labels[:, None] == labels[None]
        return (torch.cdist(made, made) * alike).mean()

    return _labels(job, loss)


class Plain(nn.Module):
    """Two encoders without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Encoder(), Encoder()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors."""
        return self.first(a) * self.scale, self.second(b)


@script("gives the loss of pairs as loss_fn")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    model = Plain().double()

    def loss_fn(output: tuple[Tensor, Tensor], a: Tensor, b: Tensor) -> Tensor:
        u, v = output
        return cross_entropy(u @ v.t(), torch.arange(len(u)))

    batches = [_views() for _ in range(3)]
    job.parallel(model, job.rows(batches[0]), loss_fn=loss_fn)
    optimizer, losses = sgd(model), []
    for batch in batches:
        mine = job.rows(batch)
        made = model(**mine)
        loss = loss_fn(made, **mine) if job.is_plain else made.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(model)}


@script("gives all ranks the whole batch of pairs")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    model, batch = Pairs(_clip).double(), _views()
    job.parallel(model, batch, data="global")
    loss = loss_of(model(**batch))
    loss.backward()
    return {"loss": float(loss.detach()), **job.gradients(model)}


@script("has batches of pairs of other sizes, unlike on ranks")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    model, losses = Pairs(_clip).double(), []
    job.parallel(model, job.rows(_views()))
    for rows in (12, 5, 9):
        batch = _views(rows)
        first = job.rank * rows // job.world
        mine = {name: tensor[first : (job.rank + 1) * rows // job.world] for name, tensor in batch.items()}
        loss = loss_of(model(**mine))
        loss.backward()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.gradients(model)}


@script("evaluates a loss of pairs, and asks for scores")
def _(job: Job) -> Results:
    class Scored(Pairs):
        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            made = super().forward(a, b)
            return {**made, "scores": made["u"] @ self.second(b).t()}

    torch.manual_seed(0)
    model, batch = Scored(_clip).double(), _views()
    job.parallel(model, job.rows(batch))
    model.eval()
    with torch.no_grad():
        made = model(**job.rows(batch))
    return {"loss": float(made["loss"]), "u": job.gathered(made["u"]), "scores": job.gathered(made["scores"])}


@script("trains on pairs in micro-batches, which see no pairs of each other", refused="one micro-batch")
def _(job: Job) -> Results:
    plan = Plan(tuple(Pipeline((Stage((rank,)),), micro_batches=2) for rank in range(job.world)))
    return _pairs(job, _clip, plan=plan)


@script("drops out in encoders of pairs, and evaluates")
def _(job: Job) -> Results:
    torch.manual_seed(0)
    model, batch = Pairs(_clip).double(), _views()
    model.first.up = nn.Sequential(model.first.up, nn.Dropout(0.5)).double()  # type: ignore[assignment]
    job.parallel(model, job.rows(batch))
    model.eval()
    with torch.no_grad():
        return {"loss": float(loss_of(model(**job.rows(batch))))}


def _transformers(job: Job, **options: Any) -> Results:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 61, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 60}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).double().train()
    ids = torch.randint(1, 60, (8, 10))
    ids[:, -1] = 60
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(8, 3, 16, 16).double(),
    }
    mine = {**job.rows(batch), "return_loss": True}
    job.parallel(model, mine, **options)
    loss = model(**mine).loss
    loss.backward()
    model.eval()
    with torch.no_grad():
        made = model(**mine)
    outputs = {"image": job.gathered(made.image_embeds), "scores": job.gathered(made.logits_per_image)}
    told = {name: value for name, value in job.gradients(model).items() if not name.endswith("k_proj.bias")}  # zero
    return {"loss": float(loss.detach()), "again": float(made.loss), **outputs, **told}


@script("trains transformers' CLIP with return_loss", tolerance=1e-6)
def _(job: Job) -> Results:
    return _transformers(job)
