"""The tensors of a checkpoint: each rank writes its part in safetensors, and any number of ranks can read them.

A file holds whole tensors and blocks of tensors by name. The metadata of a file with blocks has one entry, `blocks`:
JSON with the shape of the tensor and the offset of the block in it for each of them,
{"NAME": {"shape": [512, 64], "offset": [256, 0]}}.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.errors import extra
from residua.records.tensors import undamaged

with extra("lab"):
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

BLOCKS = "blocks"


class Block(NamedTuple):
    """A rectangular block of a tensor of `shape`: its values and their offset. A whole tensor is a block too."""

    values: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return tuple(self.values.shape) == self.shape


def local_block(tensor: Tensor) -> Block:
    """Return this rank's part of a tensor: all of it, or its shard of a DTensor that one dimension of a mesh cuts."""
    shape = tuple(tensor.shape)
    offset = [0] * len(shape)
    values = tensor.detach()
    if _is_sharded(tensor):
        (placement,) = tensor.placements
        chunk = -(-shape[placement.dim] // tensor.device_mesh.size())
        offset[placement.dim] = min(chunk * tensor.device_mesh.get_local_rank(), shape[placement.dim])
        values = values.to_local()
    return Block(values, shape, tuple(offset))


def blocks_of_rank(tensors: Mapping[str, Tensor], rank: int, world_size: int, *, copy: bool) -> dict[str, Block]:
    """Return the blocks that `rank` saves, on the CPU: its shards, and some of the tensors that all ranks hold.

    copy: copy the values, so that training can continue while they are written.
    """
    blocks: dict[str, Block] = {}
    assigned = [0] * world_size  # bytes of whole tensors per rank; the same result on all ranks
    for name, tensor in tensors.items():
        block = local_block(tensor)
        if not _is_sharded(tensor):
            writer = assigned.index(min(assigned))
            assigned[writer] += tensor.nbytes
            if writer != rank:
                continue
        if block.values.numel() or block.whole:  # the last ranks may have no rows of a small tensor
            values = block.values.to("cpu", copy=copy or block.values.device.type != "cpu").contiguous()
            blocks[name] = block._replace(values=values)
    return blocks


def write_blocks(path: Path, blocks: Mapping[str, Block]) -> None:
    """Write a new file. Raises OSError if the disk refuses."""
    parts = {name: {"shape": block.shape, "offset": block.offset} for name, block in blocks.items() if not block.whole}
    metadata = {"format": "pt"} | ({BLOCKS: json.dumps(parts)} if parts else {})
    path.touch(exist_ok=False)
    mode = path.stat().st_mode  # safetensors makes files readable only by their owner
    try:
        save_file({name: block.values for name, block in blocks.items()}, path, metadata)
    except SafetensorError as error:
        raise OSError(" ".join(str(error).split())) from error
    path.chmod(mode)


class StoredTensors:
    """The tensors of several files, put together from their blocks. A context manager, which keeps the files open.

    `shapes` gives the shape of each tensor by name. Files are memory-mapped, and `read_into` reads only what it copies.
    """

    def __init__(self, paths: Iterable[Path], source: Path):
        self._source = source
        self._parts: dict[str, list[_Part]] = {}
        with ExitStack() as stack, undamaged(self._source, "a checkpoint"):
            for path in paths:
                file = stack.enter_context(safe_open(path, "pt"))
                blocks = json.loads((file.metadata() or {}).get(BLOCKS, "{}"))
                for name in file.keys():  # noqa: SIM118, a file is no mapping
                    self._parts.setdefault(name, []).append(_part(file, name, blocks.get(name)))
            self._open = stack.pop_all()
        self.shapes = {name: parts[0].shape for name, parts in self._parts.items()}

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill a tensor of the stored shape in place; for a DTensor, fill the shard of this rank."""
        local = local_block(tensor)
        with torch.no_grad(), undamaged(self._source, "a checkpoint"):
            for part in self._parts[name]:
                begin = [max(a, b) for a, b in zip(local.offset, part.offset)]
                end = [
                    min(a + size, b + part_size)
                    for a, size, b, part_size in zip(local.offset, local.values.shape, part.offset, part.size)
                ]
                if all(a < b for a, b in zip(begin, end)):
                    box = _slices(begin, end, local.offset)
                    local.values[box].copy_(part.values()[_slices(begin, end, part.offset)])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored."""
        with undamaged(self._source, "a checkpoint"):
            return self._parts[name][0].values().dtype


class _Part(NamedTuple):
    """A block in an open file: the whole tensor's shape, and the block's size and offset."""

    file: Any
    name: str
    shape: tuple[int, ...]
    size: tuple[int, ...]
    offset: tuple[int, ...]

    def values(self) -> Tensor:
        """Return the block as a view of the mapped file; only the parts that are used are read."""
        return self.file.get_tensor(self.name)


def _slices(begin: Sequence[int], end: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of the box [begin, end) within a block that begins at `offset`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offset))


def _part(file: Any, name: str, block: Any) -> _Part:
    size = tuple(file.get_slice(name).get_shape())
    if block is None:
        return _Part(file, name, size, size, (0,) * len(size))
    return _Part(file, name, tuple(block["shape"]), size, tuple(block["offset"]))


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and tensor.numel() > 0
