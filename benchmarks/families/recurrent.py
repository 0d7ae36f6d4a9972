"""Recurrent nets: cells in a loop over positions, and torch's own layers of them; each predicts the next token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.families.batches import VOCABULARY


class Recurrent(nn.Module):
    """Embeds tokens, runs them through a body, and scores the next ones."""

    def __init__(self, body: nn.Module, width: int = 20, hidden: int = 24) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(VOCABULARY, width), body
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Give scores and the mean cross-entropy of the labels that count."""
        logits = self.head(self.body(self.tokens(input_ids)))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class LstmCells(nn.Module):
    """Two LSTM cells in a loop over positions."""

    def __init__(self, width: int = 20, hidden: int = 24) -> None:
        super().__init__()
        self.first, self.second, self.hidden = nn.LSTMCell(width, hidden), nn.LSTMCell(hidden, hidden), hidden

    def forward(self, x: Tensor) -> Tensor:
        """Give the second cell's output at every position."""
        nothing = x.new_zeros(x.size(0), self.hidden)
        first, second, outputs = (nothing, nothing), (nothing, nothing), []
        for position in range(x.size(1)):
            first = self.first(x[:, position], first)
            second = self.second(first[0], second)
            outputs.append(second[0])
        return torch.stack(outputs, 1)


class GruCells(nn.Module):
    """One GRU cell in a loop over positions, whose first state is learned."""

    def __init__(self, width: int = 20, hidden: int = 24) -> None:
        super().__init__()
        self.cell, self.start = nn.GRUCell(width, hidden), nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Give the cell's state after every position."""
        state, states = self.start.expand(x.size(0), -1), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states, 1)


class Layer(nn.Module):
    """One of torch's recurrent layers, without its last state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Give the output at every position."""
        output: Tensor = self.layer(x)[0]
        return output


def lstm() -> nn.Module:
    """Two layers of nn.LSTM."""
    return Recurrent(Layer(nn.LSTM(20, 24, num_layers=2, batch_first=True)))


def gru() -> nn.Module:
    """nn.GRU in both directions."""
    return Recurrent(Layer(nn.GRU(20, 12, batch_first=True, bidirectional=True)))


def lstm_cells() -> nn.Module:
    """A loop over positions of nn.LSTMCell."""
    return Recurrent(LstmCells())


def gru_cells() -> nn.Module:
    """A loop over positions of nn.GRUCell."""
    return Recurrent(GruCells())


LAYERS: Mapping[str, Callable[[], nn.Module]] = {"net: lstm": lstm, "net: gru": gru}
CELLS: Mapping[str, Callable[[], nn.Module]] = {"net: lstm cells": lstm_cells, "net: gru cells": gru_cells}
