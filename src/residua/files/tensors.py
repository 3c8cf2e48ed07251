"""Read and write tensors as safetensors, which executes nothing. A forged or damaged file raises a one-line error."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from residua.errors import InputError, extra
from residua.files.durable import write_bytes
from residua.files.reading import regular

with extra("lab"):
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors by name, and metadata, as a safetensors file that replaces `path` in one step. Raises OSError."""
    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(cpu_tensors, dict(metadata)))


def read_tensors(path: str | os.PathLike[str], what: str, advice: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata. Raises InputError as `undamaged` does."""
    with undamaged(path, what, advice), safe_open(regular(Path(path)), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118, no mapping


@contextmanager
def undamaged(source: object, what: str, advice: str = "") -> Iterator[None]:
    """Turn every error of reading and checking tensors in the `with` block into an InputError.

    source: the file or folder; what: its expected kind; advice: the remedy, at the end of the message.

    Raises:
        InputError: reading or checking the content failed.
    """
    try:
        yield
    except InputError:
        raise
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        end = advice and f"; {advice}"
        raise InputError(f"{source} must be {what}, got a damaged file ({reason}){end}") from error


@contextmanager
def undamaged_weights(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the error of safetensors for damaged weights, which names no file, into an InputError that does.

    folder: the folder that transformers opens in the `with` block, or a name on the hub, of which files are unknown.

    Raises:
        InputError: a file of weights is damaged.
    """
    what, advice = "weights in the format safetensors", "copy, download or save it again"
    try:
        yield
    except SafetensorError:
        for path in sorted(Path(folder).glob("*.safetensors")):
            with undamaged(path, what, advice), safe_open(path, "pt"):
                pass
        with undamaged(folder, what, advice):
            raise
