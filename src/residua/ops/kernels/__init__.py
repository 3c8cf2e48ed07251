"""Triton kernels for operations of `residua.ops`, under the same names; the argument `implementation` selects them.

Importing this package needs triton; importing residua does not. All arithmetic is in float32, whatever the dtype of the
tensors. Every kernel is a custom operator of torch.library, so that torch.compile has no graph break.
"""

try:
    import triton  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise ModuleNotFoundError(
        "triton is not installed; it comes with: pip install 'residua[kernels]'", name="triton"
    ) from error
