"""Start the parameters of a module as its code says, also if an engine has sharded them.

An engine builds a model on the meta device, shards it with `fully_shard`, gives it memory with `to_empty`, and calls
`reset_parameters` of every module. The parameters are then `DTensor`s: a part such as `taps[0]` may be a copy, so that
writing to it changes nothing, and each rank would draw other numbers than one process.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def on_whole_tensors(reset: Callable[[Module], None]) -> Callable[[Module], None]:
    """Wrap a function that fills a module's own parameters: it fills whole tensors, and each rank keeps its shards.

    The whole tensors are those of rank 0, filled as if it were alone. On the meta device nothing is drawn, which would
    take long and import torch's compiler.
    """

    @functools.wraps(reset)
    def call(module: Module) -> None:
        parameters = dict(module.named_parameters(recurse=False))
        if any(x.is_meta for x in parameters.values()):
            return
        sharded = {name: x for name, x in parameters.items() if hasattr(x, "device_mesh")}
        if not sharded:
            reset(module)
            return
        from torch.distributed.tensor import distribute_tensor

        for name, x in sharded.items():
            module._parameters[name] = nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        reset(module)
        for name, x in sharded.items():
            whole = module.get_parameter(name).detach()
            module._parameters[name] = x
            with torch.no_grad():
                x.copy_(distribute_tensor(whole, x.device_mesh, x.placements))  # type: ignore[attr-defined]

    return call
