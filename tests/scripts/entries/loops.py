"""Training loops as people write them."""

from __future__ import annotations

import torch

from tests.scripts.job import Job, loss_of
from tests.scripts.script import Results, script


@script("trains with AdamW")
def _(job: Job) -> Results:
    model, batch = job.mlp()
    job.parallel(model, batch)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    losses = []
    for _ in range(3):
        loss = loss_of(model(**job.rows(batch)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, **job.parameters(model)}
