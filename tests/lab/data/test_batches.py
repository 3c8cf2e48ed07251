"""Batches: exactly the windows of an epoch, from (seed, index) alone, whatever the number of ranks."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from residua.errors import InputError
from residua.lab.data.batches import ROUNDS, Batches, HeldOutBatches, shuffled


class Counting:
    """Tokens 0, 1, 2, ...: a window tells where it was taken."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def window(self, start, length):
        assert 0 <= start <= start + length <= self.length
        return np.arange(start, start + length)


keys_ = st.lists(st.integers(0, 2**64 - 1), min_size=ROUNDS, max_size=ROUNDS)


@example(1, [0] * ROUNDS)
@given(st.integers(1, 20_000), keys_)
def test_shuffled_is_a_permutation_for_every_key(size, keys):
    images = shuffled(np.arange(size), size, keys)
    assert np.array_equal(np.sort(images), np.arange(size))


@given(st.integers(10**9, 10**13), keys_)
def test_shuffled_allocates_no_table(size, keys):
    positions = np.arange(size - 5000, size)
    images = shuffled(positions, size, keys)
    assert len(np.unique(images)) == len(positions)
    assert images.min() >= 0
    assert images.max() < size
    assert np.array_equal(shuffled(positions[7:9], size, keys), images[7:9])  # each alone as in company


@pytest.mark.slow
def test_every_window_comes_at_every_position_equally_often():
    windows, epochs = 7, 4200
    batches = Batches(Counting(windows * 8 + 8), windows, 8, seed=0)
    assert batches.windows_per_epoch == windows  # so a batch is an epoch
    counts = np.zeros((windows, windows), dtype=int)
    phases = np.zeros(8, dtype=int)
    for epoch in range(epochs):
        starts = batches.at(epoch)[0][:, 0].numpy()
        counts[np.arange(windows), starts // 8] += 1
        phases[starts[0] % 8] += 1
    # Expected 600 and 525, with standard deviations of 23 and 21.
    assert np.abs(counts - epochs / windows).max() < 90
    assert np.abs(phases - epochs / 8).max() < 90


def test_shuffling_separates_neighbours():
    images = shuffled(np.arange(100_000), 100_000, [3, 1, 4, 1, 5, 9])
    assert np.abs(np.diff(images)).mean() == pytest.approx(100_000 / 3, rel=0.02)
    assert abs(np.corrcoef(np.arange(100_000), images)[0, 1]) < 0.02


@settings(deadline=None)
@given(
    length=st.integers(5, 400),
    sequence_length=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    seed=st.integers(-(2**70), 2**70),
)
def test_each_window_comes_once_in_an_epoch(length, sequence_length, batch_size, seed):
    sequence_length = min(sequence_length, length - 1)
    batches = Batches(Counting(length), batch_size, sequence_length, seed)
    windows = batches.windows_per_epoch
    samples = -(-2 * windows // batch_size)
    inputs = torch.cat([batches.at(index)[0] for index in range(samples)])[: 2 * windows]
    for epoch in (inputs[:windows], inputs[windows:]):
        seen = sorted(epoch.flatten().tolist())
        assert seen == list(range(seen[0], seen[0] + windows * sequence_length))  # touching, no overlap, no gap
        assert seen[0] < sequence_length
        assert length - 1 - seen[-1] < 2 * sequence_length


def test_labels_are_the_following_tokens():
    inputs, labels = Batches(Counting(1000), 4, 16, seed=1).at(3)
    assert inputs.shape == labels.shape == (4, 16)
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.is_contiguous()
    assert labels.is_contiguous()
    assert torch.equal(labels, inputs + 1)


def test_inputs_and_labels_do_not_share_memory():
    for batches in ([Batches(Counting(100), 1, 16, seed=1).at(0)], HeldOutBatches(Counting(10), 1, 16)):
        for inputs, labels in batches:
            before = labels.clone()
            inputs.fill_(7)
            assert torch.equal(labels, before)


def test_seed_and_index_determine_a_batch():
    tokens = Counting(100_000)
    forward = [Batches(tokens, 4, 32, seed=5).at(index) for index in range(20)]
    again = Batches(tokens, 4, 32, seed=5)
    for index in reversed(range(20)):
        assert torch.equal(again.at(index)[0], forward[index][0])
    assert not torch.equal(Batches(tokens, 4, 32, seed=6).at(0)[0], forward[0][0])


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 12), (2, 6), (3, 4), (12, 1)])
def test_the_global_batch_does_not_depend_on_the_ranks(world_size, batch_size):
    tokens = Counting(997)
    for index in (0, 1, 5, 1000):
        whole = Batches(tokens, 12, 16, seed=2).at(index)
        parts = [Batches(tokens, batch_size, 16, 2, rank, world_size).at(index) for rank in range(world_size)]
        for which in range(2):
            assert torch.equal(torch.cat([part[which] for part in parts]), whole[which])


def test_one_window_of_data_is_enough():
    inputs, labels = Batches(Counting(9), 3, 8, seed=0).at(10**12)
    assert inputs.tolist() == [list(range(8))] * 3
    assert labels.tolist() == [list(range(1, 9))] * 3


def test_data_shorter_than_a_window_are_refused():
    with pytest.raises(InputError, match="sequence_length: 9 needs 10 tokens, the data has 9"):
        Batches(Counting(9), 1, 9, seed=0)


@given(length=st.integers(2, 300), batch_size=st.integers(1, 7), sequence_length=st.integers(1, 40))
def test_HeldOutBatches_label_every_token_but_the_first_once(length, batch_size, sequence_length):
    batches = HeldOutBatches(Counting(length), batch_size, sequence_length)
    found = list(batches)
    assert len(found) == len(batches)
    for inputs, labels in found:
        assert inputs.shape == labels.shape
        assert inputs.shape[1] == sequence_length
        real = labels != -100
        assert torch.equal(labels[real], inputs[real] + 1)
        assert (inputs[~real] == 0).all()
    labels = torch.cat([labels.flatten() for _, labels in found])
    assert labels[labels != -100].tolist() == list(range(1, length))
    assert all(len(inputs) == batch_size for inputs, _ in found[:-1])
    assert all(torch.equal(a, b) for a, b in zip([i for i, _ in found], [i for i, _ in batches]))


def test_batches_of_terabytes_need_little_memory():
    tracemalloc.start()
    batches = Batches(Counting(10**13 + 7), 8, 1024, seed=0)
    inputs, _ = batches.at(10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6
    assert len(set(inputs[:, 0].tolist())) == 8
    assert inputs.max() > 10**12
