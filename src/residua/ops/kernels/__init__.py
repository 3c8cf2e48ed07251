"""Triton kernels for operations of `residua.ops`, under the same names; the argument `implementation` selects them.

Importing this package needs triton; importing residua does not. All arithmetic is in float32, whatever the dtype of the
tensors. Every kernel is a custom operator of torch.library, so that torch.compile has no graph break.
"""

from residua.errors import NotInstalled, installing

try:
    import triton  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise NotInstalled(f"triton is not installed; it comes with: {installing('kernels')}", name="triton") from error
