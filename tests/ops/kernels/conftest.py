"""What the tests of kernels share."""

import importlib.util
import os

import pytest
import torch

from support.interpreter import prepared_once  # noqa: F401


@pytest.fixture(autouse=True)
def _round_as_a_gpu_does(monkeypatch):
    """The interpreter cuts float32 off where it makes bfloat16 of it; a GPU rounds to the nearest."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(self, source, to):
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        nearest = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(nearest.numpy(), tl.bfloat16)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounded)
