"""A language model and its batches, small enough for thousands of steps a second, with ways to fail on demand."""

import os
import signal
import time
from types import SimpleNamespace

import torch
from torch import nn

from residua.lab.training import TrainConfig

VOCABULARY = 11
BATCH, LENGTH = 2, 5


class ToyModel(nn.Module):
    """Tied embedding, gain, dropout: everything that a resume could get wrong. `poison` maps a forward to a factor."""

    def __init__(self, poison: dict[int, float] | None = None):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, 8)
            self.gain = nn.Parameter(torch.ones(8))
            self.dropout = nn.Dropout(0.2)
            self.hidden = nn.Linear(8, 8)
            self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.poison = poison or {}
        self.calls = 0

    def forward(self, input_ids, labels=None, shift_labels=None):
        hidden = self.dropout(self.embedding(input_ids) * self.gain) * self.scale
        logits = self.head(hidden + torch.tanh(self.hidden(hidden)))
        loss = None
        if shift_labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), shift_labels.flatten())
        if self.training:
            self.calls += 1
            loss = loss * self.poison.get(self.calls, 1.0)
        return SimpleNamespace(loss=loss, logits=logits)


class ToyBatches:
    """Batch `index` of random tokens; `signals` maps an index to a signal that it sends to its own process."""

    def __init__(self, pause: float = 0.0, signals: dict[int, signal.Signals] | None = None):
        self.pause, self.signals = pause, signals or {}
        self.asked = []

    def at(self, index):
        self.asked.append(index)
        time.sleep(self.pause)
        if index in self.signals:
            os.kill(os.getpid(), self.signals[index])
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(index))
        return tokens[:, :-1], tokens[:, 1:]


def evaluate(model):
    """A loss on fixed tokens; it draws random numbers, which must not reach the training."""
    torch.rand(3)
    assert not model.training
    assert not torch.is_grad_enabled()
    inputs, labels = ToyBatches().at(10_000)
    return {"val_loss": model(inputs, labels=labels, shift_labels=labels).loss.item(), "tokens": BATCH * LENGTH}


def toy_config(**changes) -> TrainConfig:
    """Twelve steps with a checkpoint every three."""
    defaults = {"steps": 12, "batch_size": BATCH, "sequence_length": LENGTH, "lr": 0.01, "warmup_steps": 2}
    defaults |= {"checkpoint_every": 3, "evaluate_every": 4, "tensorboard": False, "device": "cpu"}
    return TrainConfig(**(defaults | changes))
