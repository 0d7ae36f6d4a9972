"""Gradient errors that were published of other systems, rebuilt as cases of `hetu-fx verify`.

`hetu-fx verify tests/end_to_end/published/cases.py:NAME --plan FILE --ranks N` runs one; `PLANS` has the plan of each.
A case is a small model in which the published error would show: its loss or a gradient would differ from one device.

Of NVIDIA/Megatron-LM#7452 ("Silent numerical-correctness bugs in Megatron Core parallelism composition", September
2026) the cases in `PUBLISHED` are rebuilt, by the number of the finding there. Those in `ALIKE` were not found there:
they are errors of the same kind, between tensor, sequence, pipeline and data parallelism, which such systems have had
or could have.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hetu_fx.plans.plan import Pipeline, Plan, Stage

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY, EXPERTS, IGNORED = 6, 8, 24, 4, 37, 4, -100
Batch = dict[str, Tensor]
Case = tuple[nn.Module, Batch]

TENSOR = Plan((Pipeline((Stage((0, 1)),)),))
UNEVEN = Plan((Pipeline((Stage((0, 1), (3, 1)),)),))
SEQUENCE = Plan((Pipeline((Stage((0, 1)),)),), sequence_parallel=True)
BOTH = Plan((Pipeline((Stage((0, 1)),), share=2), Pipeline((Stage((2, 3)),), share=1)), sequence_parallel=True)
ROWS_APART = Plan.data_parallel((0, 1), (2, 1))
STAGES = Plan((Pipeline((Stage((0, 1)), Stage((2,))), micro_batches=2),))
CONTEXT = Plan.context_parallel((0, 1), (5, 3))

PUBLISHED: Mapping[int, str] = {
    1: "smoothed_labels_over_a_split_vocabulary",
    3: "second_token_head_with_uneven_counts",
    5: "padded_tokens_of_experts_beside_tensor_parallel",
    8: "learned_sinks_of_split_heads",
    10: "padded_tokens_in_the_experts_loss",
    11: "one_norm_for_all_split_heads",
}
ALIKE = (
    "tied_embedding_over_stages",
    "biases_after_split_products",
    "context_in_uneven_parts",
    "labels_of_one_replica_all_ignored",
    "micro_batches_of_uneven_counts",
    "norms_of_queries_and_keys_in_sequence_parts",
    "narrow_projections_that_are_not_split",
    "gate_of_a_shared_expert",
    "squared_log_of_the_partition",
    "blocks_that_are_computed_again",
)
PLANS: Mapping[str, tuple[Plan, ...]] = {
    "smoothed_labels_over_a_split_vocabulary": (TENSOR, UNEVEN),
    "second_token_head_with_uneven_counts": (ROWS_APART, BOTH),
    "padded_tokens_of_experts_beside_tensor_parallel": (SEQUENCE, BOTH),
    "learned_sinks_of_split_heads": (TENSOR, UNEVEN),
    "padded_tokens_in_the_experts_loss": (SEQUENCE, TENSOR),
    "one_norm_for_all_split_heads": (TENSOR, UNEVEN, BOTH),
    "tied_embedding_over_stages": (STAGES,),
    "biases_after_split_products": (TENSOR, SEQUENCE, BOTH),
    "context_in_uneven_parts": (CONTEXT,),
    "labels_of_one_replica_all_ignored": (ROWS_APART, BOTH),
    "micro_batches_of_uneven_counts": (STAGES,),
    "norms_of_queries_and_keys_in_sequence_parts": (SEQUENCE, BOTH),
    "narrow_projections_that_are_not_split": (SEQUENCE, TENSOR),
    "gate_of_a_shared_expert": (SEQUENCE, BOTH),
    "squared_log_of_the_partition": (UNEVEN, BOTH),
    "blocks_that_are_computed_again": (TENSOR, ROWS_APART),
}


class Attention(nn.Module):
    """Causal attention, with what the cases vary: sinks, norms of heads, narrow projections."""

    def __init__(self, *, sinks: bool = False, normed: bool = False, gated: bool = False, narrow: bool = False) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        inputs = 10 if narrow else WIDTH
        self.down = nn.Linear(WIDTH, inputs) if narrow else nn.Identity()
        self.query, self.key, self.value = (nn.Linear(inputs, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if sinks else None
        self.norms = nn.ModuleList(nn.RMSNorm(self.size) for _ in range(2)) if normed else None
        self.out_norm, self.gate = (nn.RMSNorm(self.size), nn.Linear(WIDTH, WIDTH)) if gated else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        narrow = self.down(x)
        query, key, value = (
            part(narrow).view(rows, length, HEADS, self.size) for part in (self.query, self.key, self.value)
        )
        if self.norms is not None:
            query, key = self.norms[0](query), self.norms[1](key)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * self.size**-0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", self._weights(scores.masked_fill(hidden, -1e4)), value)
        if self.out_norm is not None:
            mixed = self.out_norm(mixed) * functional.silu(self.gate(x).view(mixed.shape))
        attended: Tensor = self.out(mixed.reshape(rows, length, WIDTH))
        return attended

    def _weights(self, scores: Tensor) -> Tensor:
        """Give what is attended to; with sinks, a part of each head's attention goes nowhere."""
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.view(1, -1, 1, 1).expand(scores.size(0), -1, scores.size(2), 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


class Experts(nn.Module):
    """A mixture of which each token takes two, beside one that all take, weighed by a gate."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) * 0.2)
        self.shared = nn.Sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH)) if shared else None
        self.gate = nn.Linear(WIDTH, 1, bias=False) if shared else None

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Give the mixture, and the loss that keeps experts evenly used by the tokens that count."""
        likely = self.router(x).softmax(-1)
        best, chosen = likely.topk(2, dim=-1)
        taken = functional.one_hot(chosen, EXPERTS).to(x.dtype)
        weights = (taken * best.unsqueeze(-1)).sum(-2)
        hidden = functional.silu(torch.einsum("btk,eko->beto", x, self.up))
        made = torch.einsum("beto,eok,bte->btk", hidden, self.down, weights)
        if self.shared is not None:
            made = made + torch.sigmoid(self.gate(x)) * self.shared(x)
        kept = counts.to(x.dtype).unsqueeze(-1)
        used = (taken.sum(-2) * kept).sum((0, 1)) / kept.sum()
        expected = (likely * kept).sum((0, 1)) / kept.sum()
        return made, EXPERTS * (used * expected).sum()


class Block(nn.Module):
    """Attention and a feed-forward or experts, each after a norm."""

    def __init__(self, attention: Attention, experts: Experts | None) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), attention
        self.experts = experts
        self.up, self.down = (nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)) if experts is None else (None, None)

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.attention(self.first(x))
        y = self.second(x)
        if self.experts is None:
            return x + self.down(functional.gelu(self.up(y))), None
        made, balance = self.experts(y, counts)
        return x + made, balance


class Decoder(nn.Module):
    """Two blocks that predict the next token; `tied`, `smoothing` and the rest are what the cases are about."""

    def __init__(
        self,
        attention: Attention | None = None,
        experts: Experts | None = None,
        *,
        tied: bool = False,
        smoothing: float = 0.0,
        second: bool = False,
        log_weight: float = 0.0,
        balance_weight: float = 0.0,
        again: bool = False,
    ) -> None:
        super().__init__()
        attention = attention or Attention()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(copy.deepcopy(Block(attention, experts)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.after = Block(Attention(), None) if second else None
        self.smoothing, self.log_weight, self.balance_weight = smoothing, log_weight, balance_weight
        self.again = again
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        counts = input_ids != 0
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.size(1), device=input_ids.device))
        balances = []
        for block in self.blocks:
            x, balance = checkpoint(block, x, counts, use_reentrant=False) if self.again else block(x, counts)
            balances += [balance] * (balance is not None)
        logits = self.head(self.norm(x))
        loss = self._mean(logits, labels)
        if self.log_weight:
            kept = (labels != IGNORED).to(logits.dtype)
            loss = loss + self.log_weight * (logits.logsumexp(-1).pow(2) * kept).sum() / kept.sum()
        if self.after is not None:
            later = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
            loss = loss + 0.3 * self._mean(self.head(self.norm(self.after(x, counts)[0])), later)
        if self.balance_weight:
            loss = loss + self.balance_weight * torch.stack(balances).sum()
        return {"loss": loss}

    def _mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=self.smoothing
        )


def tokens(*, padded: bool = False, ignored: int = 0) -> Batch:
    """Make a batch; ends of rows are padding, or the labels of the last rows do not count at all."""
    input_ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    labels = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    for row in range(ROWS if padded else 0):
        input_ids[row, LENGTH - row :] = 0
        labels[row, LENGTH - row :] = IGNORED
    if ignored:
        labels[-ignored:] = IGNORED
    return {"input_ids": input_ids, "labels": labels}


def smoothed_labels_over_a_split_vocabulary() -> Case:
    """Finding 1: smoothing took the mean of a rank's own part of the vocabulary for that of the whole."""
    return Decoder(smoothing=0.2), tokens()


def second_token_head_with_uneven_counts() -> Case:
    """Finding 3: the loss of a head for the token after next was divided by each replica's own count of labels."""
    return Decoder(second=True), tokens(padded=True)


def padded_tokens_of_experts_beside_tensor_parallel() -> Case:
    """Finding 5: the padding of sequence shards was taken over another tensor-parallel group than the experts'."""
    return Decoder(experts=Experts(shared=True)), tokens(padded=True)


def learned_sinks_of_split_heads() -> Case:
    """Finding 8: a sink for each head is split with the heads, but its gradient counted on one rank only."""
    return Decoder(Attention(sinks=True)), tokens()


def padded_tokens_in_the_experts_loss() -> Case:
    """Finding 10: with padding, a count of tokens was summed in place, and the balance loss scaled by the sum."""
    return Decoder(experts=Experts(), balance_weight=0.5), tokens(padded=True)


def one_norm_for_all_split_heads() -> Case:
    """Finding 11: the weight of a gated norm is on every rank, each of which has the gradient of its own heads only."""
    return Decoder(Attention(gated=True)), tokens()


def tied_embedding_over_stages() -> Case:
    """The first and the last stage share a matrix, whose gradients are to be added once."""
    return Decoder(tied=True), tokens()


def biases_after_split_products() -> Case:
    """The bias of a product that is summed over ranks is added once, not once on each."""
    return Decoder(), tokens()


def context_in_uneven_parts() -> Case:
    """Parts of a sequence have unlike numbers of tokens, and of labels."""
    return Decoder(), tokens(padded=True)


def labels_of_one_replica_all_ignored() -> Case:
    """One replica has no token that counts, and must still take part, with a gradient of nothing."""
    return Decoder(), tokens(ignored=ROWS // 3)


def micro_batches_of_uneven_counts() -> Case:
    """Gradients of micro-batches are weighed by their tokens, not by their number."""
    return Decoder(), tokens(padded=True)


def norms_of_queries_and_keys_in_sequence_parts() -> Case:
    """Norms of queries and keys, shared by heads, and those of blocks, each of a part of the sequence."""
    return Decoder(Attention(normed=True)), tokens()


def narrow_projections_that_are_not_split() -> Case:
    """A projection that is whole on each rank reads a part of the sequence, and feeds heads that are split."""
    return Decoder(Attention(narrow=True)), tokens()


def gate_of_a_shared_expert() -> Case:
    """The gate of the expert that all tokens take is whole on each rank, of which each has other tokens."""
    return Decoder(experts=Experts(shared=True)), tokens()


def squared_log_of_the_partition() -> Case:
    """The log of the sum over a split vocabulary, squared: its derivative needs the whole sum."""
    return Decoder(log_weight=0.1), tokens(padded=True)


def blocks_that_are_computed_again() -> Case:
    """Blocks under torch.utils.checkpoint: what is computed again is what was computed."""
    return Decoder(again=True), tokens()
