"""Compiles every kernel for a GPU that need not be there. Run with TRITON_INTERPRET=0: prints one line for each."""

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from residua.ops.kernels import channel_boundary, delta, replay, sinkhorn, streams, token_boundary
from residua.ops.kernels.launch import num_warps, tiling, whole_row

CHANNELS, DIM = 4, 768
TILE, WHOLE = tiling(CHANNELS, DIM), whole_row(CHANNELS, DIM)
SIZES = {"DIM": DIM, "CHANNELS": CHANNELS, "ROWS": TILE.rows}
BLOCKS = {**SIZES, "BLOCK": TILE.block, "BLOCKS": TILE.blocks}
BLOCK = {**SIZES, "BLOCK": WHOLE.block}
TAPS = {**BLOCK, "KERNEL": 4}
FIRST = {"K_NORM": "rms", "FROM_CONTEXT": False}
SECOND = {"K_NORM": "add", "FROM_CONTEXT": True}
KERNELS = [
    (delta._forward, {**BLOCKS, "K_NORM": "rms"}, num_warps(TILE, 120)),
    (delta._forward, {**BLOCKS, "K_NORM": "none"}, num_warps(TILE, 120)),
    (delta._backward, {**BLOCKS, "K_NORM": "rms"}, num_warps(TILE, 120)),
    (delta._backward, {**BLOCKS, "K_NORM": "clamp"}, num_warps(TILE, 120)),
    (replay._replay, BLOCKS, num_warps(TILE, 120)),
]
for options in (FIRST, SECOND):
    KERNELS += [
        (channel_boundary._forward, {**BLOCKS, **options}, num_warps(TILE, 120)),
        (channel_boundary._backward, {**BLOCK, **options}, num_warps(WHOLE, 40)),
        (token_boundary._forward, {**TAPS, **options}, num_warps(WHOLE, 40)),
        (token_boundary._backward, {**TAPS, **options}, num_warps(WHOLE, 20)),
    ]
ROW = streams.columns(torch.empty(DIM, dtype=torch.bfloat16))
STREAMS = {"DIM": DIM, "STREAMS": CHANNELS, "BLOCK": ROW.block}
SUMS = {**STREAMS, "GROUP": ROW.group}
MIXED = {"MIXES": True, "WRITES": True}
ADDED = {"h_res": None, "MIXES": False, "WRITES": True}
_, ROWS, TOKENS = sinkhorn.cut(CHANNELS, 1)
MATRICES = {"N": CHANNELS, "ROWS": ROWS, "TOKENS": TOKENS}
KERNELS += [
    (streams._read, STREAMS, 1),
    (streams._read_backward, SUMS, 1),
    (streams._write, {**STREAMS, **MIXED}, 1),
    (streams._write, {**STREAMS, **ADDED}, 1),
    (streams._write_backward, {**SUMS, **MIXED}, 1),
    (streams._write_backward, {**SUMS, **ADDED, "streams": None, "grad_streams": None, "grad_res": None}, 1),
    (sinkhorn._forward, MATRICES, 1),
    (sinkhorn._backward, MATRICES, 1),
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


for kernel, constants, warps in KERNELS:
    # With one set of options; with the other the replay is the same code.
    replays = "since" in kernel.arg_names and not constants.get("FROM_CONTEXT")
    for writes in (0, 3) if replays else (0,):
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
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        code = compiled.asm["ptx"]
        wide, sums = code.count("ld.global.v4.b32"), len(re.findall(r"(?:add|sub)(?:\.rn)?\.f32", code))
        print(kernel.__module__, kernel.__name__, writes, len(compiled.asm["cubin"]), wide, sums)
