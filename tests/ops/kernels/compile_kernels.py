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

from residua.ops.kernels import channel_boundary, delta, replay, sinkhorn, streams, token_boundary
from residua.ops.kernels.launch import num_warps, tiling, whole_row

CHANNELS = 4
FIRST = {"K_NORM": "rms", "FROM_CONTEXT": False}
SECOND = {"K_NORM": "add", "FROM_CONTEXT": True}
MIXED = {"MIXES": True, "WRITES": True}
ADDED = {"h_res": None, "MIXES": False, "WRITES": True}


def kernels(dim: int) -> list[tuple]:
    """Return every kernel for states of this width, with its constants and warps."""
    tile, whole = tiling(CHANNELS, dim), whole_row(CHANNELS, dim)
    sizes = {"DIM": dim, "CHANNELS": CHANNELS, "ROWS": tile.rows}
    blocks = {**sizes, "BLOCK": tile.block, "BLOCKS": tile.blocks}
    block = {**sizes, "BLOCK": whole.block}
    taps = {**block, "KERNEL": 4}
    cases = [
        (delta._forward, {**blocks, "K_NORM": "rms"}, num_warps(tile, 120)),
        (delta._forward, {**blocks, "K_NORM": "none"}, num_warps(tile, 120)),
        (delta._backward, {**blocks, "K_NORM": "rms"}, num_warps(tile, 120)),
        (delta._backward, {**blocks, "K_NORM": "clamp"}, num_warps(tile, 120)),
        (replay._replay, blocks, num_warps(tile, 120)),
    ]
    for options in (FIRST, SECOND):
        cases += [
            (channel_boundary._forward, {**blocks, **options}, num_warps(tile, 120)),
            (channel_boundary._backward, {**block, **options}, num_warps(whole, 40)),
            (token_boundary._forward, {**taps, **options}, num_warps(whole, 40)),
            (token_boundary._backward, {**taps, **options}, num_warps(whole, 20)),
        ]
    row = streams.columns(torch.empty(dim, dtype=torch.bfloat16))
    rows = {"DIM": dim, "STREAMS": CHANNELS, "BLOCK": row.block}
    sums = {**rows, "GROUP": row.group}
    _, padded, tokens = sinkhorn.cut(CHANNELS, 1)
    matrices = {"N": CHANNELS, "ROWS": padded, "TOKENS": tokens}
    return [
        *cases,
        (streams._read, rows, 1),
        (streams._read_backward, sums, 1),
        (streams._write, {**rows, **MIXED}, 1),
        (streams._write, {**rows, **ADDED}, 1),
        (streams._write_backward, {**sums, **MIXED}, 1),
        (streams._write_backward, {**sums, **ADDED, "streams": None, "grad_streams": None, "grad_res": None}, 1),
        (sinkhorn._forward, matrices, 1),
        (sinkhorn._backward, matrices, 1),
    ]


NARROW = {"state", "written", "grad", "grad_written", "grad_state", "k", "grad_k", "context", "grad_context"}
NARROW |= {"streams", "grad_streams", "x", "y", "grad_y"}


def type_of(name: str) -> str:
    if name in ("tokens", "seq", "chunk", "iterations") or name.endswith(("stride", "every", "count")):
        return "i32"
    if name in ("eps", "norm_eps"):
        return "fp32"
    return "*bf16" if name in NARROW else "*fp32"


def since(writes: int) -> tuple:
    """Of the writes that a backward kernel replays: directions, three numbers for every token, strides."""
    return ("*bf16",) * writes, *3 * (("*fp32",) * writes,), ("i32",) * writes


def compiled(kernel, constants: dict, warps: int, writes: int):
    """Compile a kernel that replays this many writes for compute capability 9.0."""
    signature = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    # Pointers and strides are multiples of 16, as they are for such widths.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    if "since" in signature:
        signature["since"] = since(writes)
        i = kernel.arg_names.index("since")
        del aligned[i,]
        aligned |= {(i, j, n): [["tt.divisibility", 16]] for j in range(5) for n in range(writes)}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [Path(nvidia).parent / "bin" / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return registers, stack


for width in map(int, sys.argv[1:] or ["768"]):
    for kernel, constants, warps in kernels(width):
        # With one set of options; with the other the replay is the same code.
        replays = "since" in kernel.arg_names and not constants.get("FROM_CONTEXT")
        for writes in (0, 3) if replays else (0,):
            result = compiled(kernel, constants, warps, writes)
            code, cubin = result.asm["ptx"], result.asm["cubin"]
            registers, stack = resources(cubin)
            line = {
                "kernel": f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__.strip('_')}",
                "target": "sm_90",
                "triton": triton.__version__,
                "width": width,
                "options": {name: constants[name] for name in ("K_NORM", "FROM_CONTEXT", "MIXES") if name in constants},
                "replayed_writes": writes,
                "warps": warps,
                "registers": registers,
                "stack": stack,
                "shared_memory": result.metadata.shared,
                "code": len(cubin),
                "wide_loads": code.count("ld.global.v4.b32"),
                "sums": len(re.findall(r"(?:add|sub)(?:\.rn)?\.f32", code)),
            }
            print(json.dumps(line), flush=True)
