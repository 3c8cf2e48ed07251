"""Choose between the plain definition of an operation and its Triton kernel: `implementation=` of the public ops."""

import importlib.util
from typing import Literal, get_args

from torch import Tensor

from residua.errors import InputError
from residua.ops.transforms import transformed

Implementation = Literal["auto", "reference", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
_INSTALLED = importlib.util.find_spec("triton") is not None


def choose(implementation: Implementation, state: Tensor, *others: Tensor | None) -> Literal["reference", "triton"]:
    """Return the implementation that runs for these tensors; None among them is ignored.

    "reference" is the plain PyTorch definition. "triton" is the kernel, and an error if it cannot run: raises
    ModuleNotFoundError without triton, InputError for tensors that are not on a CUDA device. "auto" is "triton" if
    triton is installed and the kernels take the tensors: all on a CUDA device, in float32, bfloat16 or float16, with 1
    to 16 streams or rows in the last axis but one of `state`; otherwise, and inside a transform of `torch.func`, it is
    "reference". Tensors on the meta device, which have shapes and no numbers, need no kernel. Raises ValueError for any
    other name.

    Interpreted kernels (TRITON_INTERPRET=1 when triton was imported) run on every device, slowly; "auto" never takes
    them.
    """
    if implementation == "reference":
        return "reference"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if state.is_meta:
        return "reference"
    tensors = [x for x in (state, *others) if x is not None]
    if implementation == "auto" and (not _INSTALLED or transformed() or not all(x.is_cuda for x in tensors)):
        return "reference"
    if transformed():
        raise ValueError(
            "implementation='triton': kernels have no rules for torch.func and forward mode: use 'auto' or 'reference'"
        )
    from residua.ops.kernels.launch import DTYPES, INTERPRETED, MAX_STREAMS

    if implementation == "auto":
        fits = 1 <= state.shape[-2] <= MAX_STREAMS and all(x.dtype in DTYPES for x in tensors)
        return "triton" if fits and not INTERPRETED else "reference"
    for x in () if INTERPRETED else tensors:
        if not x.is_cuda:
            raise InputError(
                f"implementation must be 'auto' or 'reference' for tensors that are not on a CUDA device, got 'triton' "
                f"and one on {x.device}"
            )
    return "triton"
