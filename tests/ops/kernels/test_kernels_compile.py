"""The interpreter takes what a compiler refuses: every kernel compiles to machine code, without a GPU."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 26
    for line in lines:
        assert line["code"] > 1000
        assert line["wide_loads"] > 0, f"{line['kernel']} has no loads of 16 bytes"
    # A replay is made of fused products and sums. If it had others, or if the compiler fused the rest of a kernel in
    # another way beside it, gradients would have other bits than those from states that were kept.
    pairs = [(kept, replayed) for kept, replayed in pairwise(lines) if replayed["replayed_writes"]]
    assert len(pairs) == 5
    for kept, replayed in pairs:
        assert kept["kernel"] == replayed["kernel"]
        assert kept["sums"] == replayed["sums"], f"{kept['kernel']} computes differently beside a replay"
