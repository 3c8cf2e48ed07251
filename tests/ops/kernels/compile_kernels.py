"""Compile every kernel for a GPU that need not be there, and print what the compiled code takes: JSON lines.

Run with TRITON_INTERPRET=0. experiments/kernel-resources.jsonl is what it printed for the widths 768 1024 2048.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import __file__ as nvidia
from triton.compiler import ASTSource

from residua.ops.kernels import sinkhorn, streams

STREAMS = 4
WARPS = 1
MIXED = {"MIXES": True, "WRITES": True}
ADDED = {"h_res": None, "MIXES": False, "WRITES": True}


def kernels(dim: int) -> list[tuple]:
    """Return every kernel for streams of this width, with its constants."""
    row = streams.columns(torch.empty(dim, dtype=torch.bfloat16))
    rows = {"DIM": dim, "STREAMS": STREAMS, "BLOCK": row.block}
    sums = {**rows, "GROUP": row.group}
    _, padded, tokens = sinkhorn.cut(STREAMS, 1)
    matrices = {"N": STREAMS, "ROWS": padded, "TOKENS": tokens}
    return [
        (streams._read, rows),
        (streams._read_backward, sums),
        (streams._write, {**rows, **MIXED}),
        (streams._write, {**rows, **ADDED}),
        (streams._write_backward, {**sums, **MIXED}),
        (streams._write_backward, {**sums, **ADDED, "streams": None, "grad_streams": None, "grad_res": None}),
        (sinkhorn._forward, matrices),
        (sinkhorn._backward, matrices),
    ]


NARROW = {"streams", "grad_streams", "written", "grad", "x", "y", "grad_y"}


def type_of(name: str) -> str:
    if name in ("tokens", "iterations") or name.endswith(("stride", "every", "count")):
        return "i32"
    return "*bf16" if name in NARROW else "*fp32"


def compiled(kernel, constants: dict):
    """Compile a kernel for compute capability 9.0."""
    signature = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    # Pointers and strides are multiples of 16, as they are for such widths.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [Path(nvidia).parent / "bin" / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return registers, stack


for width in map(int, sys.argv[1:] or ["768"]):
    for kernel, constants in kernels(width):
        result = compiled(kernel, constants)
        cubin = result.asm["cubin"]
        registers, stack = resources(cubin)
        line = {
            "kernel": f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__.strip('_')}",
            "target": "sm_90",
            "triton": triton.__version__,
            "width": width,
            "options": {name: constants[name] for name in ("MIXES",) if name in constants},
            "warps": WARPS,
            "registers": registers,
            "stack": stack,
            "shared_memory": result.metadata.shared,
            "code": len(cubin),
            "wide_loads": result.asm["ptx"].count("ld.global.v4.b32"),
        }
        print(json.dumps(line), flush=True)
