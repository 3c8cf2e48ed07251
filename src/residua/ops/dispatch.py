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
    """Return the implementation to run for these tensors; None among them is ignored.

    "reference" is the plain PyTorch definition. "triton" is the kernel. The kernels take only tensors on a CUDA device,
    in float32, bfloat16 or float16, with 1 to 16 streams or rows in the second-to-last axis of `state`. "auto" is
    "triton" if triton is installed and the kernels take the tensors; otherwise, and inside a transform of `torch.func`,
    it is "reference". Tensors on the meta device, which have shapes but no numbers, need no kernel.

    Raises:
        ValueError: `implementation` is none of these names; or it is "triton", and there are 0 or more than 16 streams
        or the call is inside a transform. ModuleNotFoundError: `implementation` is "triton", and triton is not
        installed. InputError, TypeError: `implementation` is "triton", and the kernels do not take the device or the
        dtype.

    Interpreted kernels (TRITON_INTERPRET=1 when triton was imported) run on every device, slowly; "auto" never picks
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
            "implementation='triton': kernels do not support torch.func and forward mode; use 'auto' or 'reference'"
        )
    from residua.ops.kernels.launch import INTERPRETED

    refusal = _refusal(state.shape[-2], tensors)
    if implementation == "auto":
        return "reference" if refusal or INTERPRETED else "triton"
    if refusal:
        raise refusal
    return "triton"


def _refusal(streams: int, tensors: list[Tensor]) -> Exception | None:
    """Return the error for tensors that the kernels do not take; None if they take them."""
    from residua.ops.kernels.launch import DTYPES, INTERPRETED, MAX_STREAMS

    required = "implementation must be 'auto' or 'reference' for"
    if not 1 <= streams <= MAX_STREAMS:
        return ValueError(f"{required} 0 or more than {MAX_STREAMS} streams, got 'triton' and {streams}")
    for x in tensors:
        if not x.is_cuda and not INTERPRETED:
            return InputError(f"{required} tensors that are not on a CUDA device, got 'triton' and one on {x.device}")
        if x.dtype not in DTYPES:
            return TypeError(f"{required} dtypes except float32, bfloat16 and float16, got 'triton' and {x.dtype}")
    return None
