"""Compute each batch only from (seed, index), without a state to save and without a list of windows in memory."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from residua.errors import InputError, extra
from residua.lab.data.shards import Tokens

with extra("lab"):
    import numpy as np

import torch
from torch import Tensor

ROUNDS = 6


@dataclass
class Batches:
    """Random batches for training: every window of an epoch once, in an order that depends only on (seed, epoch).

    An epoch divides the tokens into `windows_per_epoch` windows of `sequence_length` that touch but do not overlap. The
    start of the first window differs from epoch to epoch, and so do all windows. Each epoch therefore leaves out fewer
    than 2 * sequence_length tokens at the two ends.

    With `world_size` ranks of `batch_size` each, the whole batch at `index` depends only on world_size * batch_size.
    Each rank returns consecutive rows of it. Raises InputError if the tokens do not fill one window and its last label.
    """

    tokens: Tokens
    batch_size: int
    sequence_length: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        count, length = len(self.tokens), self.sequence_length
        if count <= length:
            raise InputError(
                f"sequence_length: {length} needs {length + 1} tokens, the data has {count}; give more text or a "
                "shorter sequence_length"
            )
        # One window fewer than would fit, if possible, so that the first can start at any of sequence_length positions.
        self.windows_per_epoch = max(1, (count - length) // length)
        self._first_starts = min(length, count - self.windows_per_epoch * length)

    def at(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, two int64 tensors (batch_size, sequence_length).

        labels[b, t] is the token that follows inputs[b, t] in the text: already aligned, so do not shift them again.
        """
        first = (index * self.world_size + self.rank) * self.batch_size
        epochs, positions = np.divmod(np.arange(first, first + self.batch_size), self.windows_per_epoch)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            starts[in_epoch] = self._starts(int(epoch), positions[in_epoch])
        return _aligned(np.stack([self.tokens.window(int(start), self.sequence_length + 1) for start in starts]))

    def _starts(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        digest = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=8 * (ROUNDS + 1)).digest()
        phase, *keys = np.frombuffer(digest, dtype="<u8").tolist()
        windows = shuffled(positions, self.windows_per_epoch, keys)
        return phase % self._first_starts + windows * self.sequence_length


@dataclass
class HeldOutBatches:
    """Batches that cover the tokens in order, for evaluation: every token is a label once, except the first.

    Each iteration yields (inputs, labels), int64 tensors (rows, sequence_length) with rows = batch_size except in the
    last batch. The end of the last window is padded with inputs 0 and labels -100, which a loss ignores.

    first: tokens that every window begins with, in addition to sequence_length; they are no labels.
    """

    tokens: Tokens
    batch_size: int
    sequence_length: int
    first: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._windows = -(-(len(self.tokens) - 1) // self.sequence_length)

    def __len__(self) -> int:
        return -(-self._windows // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for first in range(0, self._windows, self.batch_size):
            rows = min(self.batch_size, self._windows - first)
            block = np.full((rows, self.sequence_length + 1), -100)
            for row in range(rows):
                start = (first + row) * self.sequence_length
                window = self.tokens.window(start, min(self.sequence_length + 1, len(self.tokens) - start))
                block[row, : len(window)] = window
            inputs, labels = _aligned(block)
            inputs.masked_fill_(labels == -100, 0)
            first = torch.tensor(self.first, dtype=torch.int64).expand(rows, -1)
            yield torch.cat([first, inputs], 1), torch.cat([torch.full_like(first, -100), labels], 1)


def shuffled(positions: np.ndarray, size: int, keys: list[int]) -> np.ndarray:
    """Map `positions` through the permutation of range(size) that `keys` (64-bit integers) choose.

    A Feistel network over pairs (row, column) of a table of at least `size` cells: each round adds a hash of one
    coordinate to the other (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). A cell beyond `size` is
    mapped again until it falls inside (cycle walking). Memory is constant in `size`.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)

    def network(cells: np.ndarray) -> np.ndarray:
        row, column = np.divmod(cells, np.uint64(columns))
        for round_, key in enumerate(keys):
            if round_ % 2:
                column = (column + _hash(row, key)) % np.uint64(columns)
            else:
                row = (row + _hash(column, key)) % np.uint64(rows)
        return row * np.uint64(columns) + column

    cells = network(positions.astype(np.uint64))
    while (outside := cells >= size).any():
        cells[outside] = network(cells[outside])
    return cells.astype(np.int64)


def _hash(values: np.ndarray, key: int) -> np.ndarray:
    """Return 32 well-mixed bits of each value, by the finaliser of splitmix64."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)


def _aligned(block: np.ndarray) -> tuple[Tensor, Tensor]:
    # Copies, so that changing inputs does not change labels.
    return torch.from_numpy(block[:, :-1].copy()), torch.from_numpy(block[:, 1:].copy())
