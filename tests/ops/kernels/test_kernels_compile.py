"""The interpreter takes what a compiler refuses: every kernel compiles to machine code, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == 8
    for line in lines:
        assert line["code"] > 1000
        assert line["wide_loads"] > 0, f"{line['kernel']} has no loads of 16 bytes"
        assert line["stack"] <= 8, f"{line['kernel']} spills registers"
