"""Tensors in blocks over several files: read as they were written."""

import pytest
import torch

from residua.errors import InputError
from residua.lab.training.shards import Block, StoredTensors, blocks_of_rank, write_blocks


def cut(tensor, ranks, axis=0):
    """The blocks of a tensor as FSDP cuts it: equal ones, of which the last may be smaller or missing."""
    start, blocks = 0, []
    for part in tensor.split(-(-tensor.shape[axis] // ranks), axis):
        offset = [0] * tensor.dim()
        offset[axis] = start
        blocks.append(Block(part.contiguous(), tuple(tensor.shape), tuple(offset)))
        start += part.shape[axis]
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize(("shape", "axis"), [((7, 3), 0), ((2, 9), 1), ((5,), 0), ((3, 4, 2), 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_blocks_of_any_number_of_ranks_are_the_tensor(ranks, shape, axis, dtype, tmp_path):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    for rank, block in enumerate(cut(tensor, ranks, axis)):
        write_blocks(
            tmp_path / f"{rank}.safetensors", {"x": block, f"scalar.{rank}": Block(torch.tensor(rank), (), ())}
        )
    found = torch.zeros_like(tensor)
    with StoredTensors(sorted(tmp_path.iterdir()), tmp_path) as stored:
        assert stored.shapes["x"] == shape
        assert stored.dtype("x") == dtype
        stored.read_into("x", found)
        scalar = torch.tensor(-1)
        stored.read_into("scalar.0", scalar)
    assert torch.equal(found, tensor)
    assert scalar == 0


def test_whole_tensors_are_shared_out_among_the_ranks():
    """Each is written once, by the rank that has the fewest bytes so far."""
    tensors = {"large": torch.ones(8), "small": torch.ones(2), "scalar": torch.tensor(1.0), "empty": torch.ones(0, 3)}
    parts = [blocks_of_rank(tensors, rank, 2, copy=False) for rank in range(2)]
    assert [set(part) for part in parts] == [{"large"}, {"small", "scalar", "empty"}]


@pytest.mark.parametrize("copy", [True, False])
def test_what_is_saved_behind_the_training_is_a_copy(copy):
    weight = torch.zeros(3)
    block = blocks_of_rank({"x": weight}, 0, 1, copy=copy)["x"]
    weight += 1
    assert torch.equal(block.values, torch.zeros(3) if copy else torch.ones(3))


def test_files_that_are_no_safetensors_are_damage(tmp_path):
    (tmp_path / "x").write_bytes(b"\x80\x04}q\x00.")
    with pytest.raises(InputError, match="got a damaged file"):
        StoredTensors([tmp_path / "x"], tmp_path)
