"""Several processes compute the steps of one, whatever their number."""

import pytest
import torch

from residua.errors import InputError
from residua.lab.evaluation.loss import shard_batches
from residua.lab.training import TrainConfig
from residua.lab.training.distributed import BatchShard, Ranks
from support.lanes import some
from support.ranks import assert_same_run, compile_eagerly, run_ranks, trained_windows, windows_alone
from support.tiny_runs import options


@pytest.mark.parametrize("connection", some(["ddl-tc", "edelta", "attnres"], lambda name: name != "attnres"))
def test_two_ranks_compute_the_same_as_one(connection, data, alone, tmp_path, start, rows):
    """Two ranks with a micro-batch each add the gradients that one process accumulates: equal to the last bit. This
    includes a penalty, shared compressors and replayed states."""
    arguments = options(data, model={"connection": connection})
    job = run_ranks(start, 2, tmp_path / "run", arguments)
    assert job.statuses == [0, 0], job.out
    assert_same_run(tmp_path / "run", alone(connection), rows, exact=True)
    assert [len(out.splitlines()) > 0 for out in job.out] == [True, False], "the first rank speaks for all"
    if connection == "edelta":
        assert all(row["penalty"] > 0 for row in rows(tmp_path / "run"))
    assert trained_windows([job], 2) == windows_alone(data)


@pytest.mark.parametrize(
    ("size", "train"),
    [
        (3, {"gradient_accumulation": 9, "batch_size": 1, "steps": 4, "clip": 0.5}),
        (2, {"gradient_accumulation": 1, "batch_size": 4, "steps": 3}),
    ],
    ids=["micro-batches", "rows"],
)
def test_ranks_accumulate_and_split_rows_if_there_are_few_micro_batches(
    size, train, data, alone, tmp_path, start, rows
):
    """Gradients are summed over three micro-batches a rank, and clipped; layers are recomputed."""
    job = run_ranks(start, size, tmp_path / "run", options(data, activation_checkpointing="true", **train))
    assert job.statuses == [0] * size, job.out
    assert_same_run(tmp_path / "run", alone(**train), rows, exact=False)
    steps, accumulation, batch_size = (train[key] for key in ("steps", "gradient_accumulation", "batch_size"))
    assert trained_windows([job], accumulation) == windows_alone(data, steps, accumulation, batch_size)


@pytest.mark.nightly
def test_layers_are_compiled_one_by_one(data, alone, tmp_path, start, rows):
    train = {"steps": 2, "evaluate_every": 2}
    arguments = options(data, model={"connection": "residual"}, compile="true", **train)
    job = run_ranks(start, 2, tmp_path / "run", arguments, {rank: [(compile_eagerly,)] for rank in range(2)})
    assert job.statuses == [0, 0], job.out
    assert_same_run(tmp_path / "run", alone("residual", **train), rows, exact=False)


def test_ranks_that_cannot_share_the_step_give_one_error(data, tmp_path, start):
    job = run_ranks(start, 3, tmp_path / "run", options(data))
    assert job.statuses == [2, 2, 2]
    lines = [line for out in job.out for line in out.splitlines()]
    assert lines == [
        "residua: the number of processes, one for each GPU, must divide a step evenly, got 3 for "
        "train.gradient_accumulation 2 micro-batches of train.batch_size 2 sequences; use one that divides either of "
        "the two"
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12, 16, 24])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 6), (4, 6), (24, 1), (1, 24), (6, 4)])
def test_the_shares_of_all_ranks_add_up_to_the_step(batch_size, accumulation, size):
    train = TrainConfig(batch_size=batch_size, gradient_accumulation=accumulation)
    try:
        shares = [BatchShard.of(train, Ranks(rank, size)) for rank in range(size)]
    except InputError:
        assert size > 1
        return
    taken = [
        (index, share.member * share.rows_here + row)
        for share in shares
        for index in share.micro_batches(3)
        for row in range(share.rows_here)
    ]
    assert sorted(taken) == [
        (index, row) for index in range(2 * accumulation, 3 * accumulation) for row in range(batch_size)
    ]
    assert len({len(share.micro_batches(3)) for share in shares}) == 1


def test_held_out_batches_are_split_into_equal_shards():
    batches = [(torch.full((1, 2), i), torch.full((1, 2), i)) for i in range(5)]
    shares = [list(shard_batches(batches, rank, 3)) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2]
    labels = sorted(int(labels[0, 0]) for share in shares for _, labels in share)
    assert labels == [-100, 0, 1, 2, 3, 4]
