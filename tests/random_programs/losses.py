"""What random models end in: a loss of the rows, or one in which rows meet."""

from __future__ import annotations

from collections.abc import Mapping

PLAIN: Mapping[str, str] = {
    "mean": "h.mean()",
    "sum": "h.sum() * 0.01",
    "mean of squares": "(h ** 2).mean()",
    "mean over rows of sums": "h.sum(-1).mean()",
    "squared error": "F.mse_loss(h, y)",
    "summed error": "F.mse_loss(h, y, reduction='sum')",
    "huber": "F.smooth_l1_loss(h, y)",
    "classes": "F.cross_entropy(h, labels, ignore_index=-100)",
    "smoothed classes": "F.cross_entropy(h, labels, label_smoothing=0.1)",
    "binary": "F.binary_cross_entropy_with_logits(h, y.sigmoid())",
    "weighed": "((h ** 2).mean(-1) * rates).sum() / rates.sum()",
    "weighed sum": "((h ** 2).mean(-1) * rates).sum()",
    "summed by rows": "(h ** 2).sum() / h.shape[0]",
    "masked": "(h * (y > 0)).sum() / (y > 0).sum().clamp(min=1)",
    "log likelihood": "F.nll_loss(h.log_softmax(-1), labels)",
    "divergence": "F.kl_div(h.log_softmax(-1), y.softmax(-1), reduction='batchmean')",
    "with a penalty": "F.mse_loss(h, y) + 0.1 * sum((p ** 2).sum() for p in self.parameters())",
}
MEETING: Mapping[str, str] = {
    "norm": "h.norm()",
    "deviation": "h.std()",
    "log of sums": "torch.logsumexp(h.flatten(), 0)",
    "largest": "h.amax()",
    "median": "h.median()",
    "root of a mean": "(h ** 2).mean().sqrt()",
    "contrast": "F.cross_entropy(h @ h.T, torch.arange(h.shape[0]))",
    "gram": "((h.T @ h) ** 2).mean()",
    "by classes": "F.cross_entropy(h, labels.clamp(min=0), weight=self.rates)",
    "product of means": "h.mean() * (h ** 2).mean()",
    "by itself": "(h ** 2).sum() / (h.detach() ** 2).sum()",
    "hard rows": "(h ** 2).mean(-1).topk(2).values.mean()",
    "sum with a penalty": "h.sum() * 0.01 + 0.1 * sum((p ** 2).sum() for p in self.parameters())",
}
LOSSES: Mapping[str, str] = {**PLAIN, **MEETING}
