"""States that the backward pass makes again instead of keeping.

A write needs the state before it, and so does a read, when their gradients are computed. Between writes the state
changes by rank one, so it is enough to keep it now and then and to replay the writes that followed: the same operations
on the same numbers, hence the same bits. The graph of autograd is the record of what to replay: the input of a write is
the output of the write before it, whose node holds the direction and the step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# What marks the inputs of a module for FSDP2 hands them on as they are; a state is followed through it.
HANDS_ON = "RegisterPostBackwardFunctionBackward"


def writer(state: Tensor) -> Any:
    """The node of the write that made `state` and can make it again, so that nobody has to keep it; else None."""
    if torch.compiler.is_compiling():  # a compiler sees no graph of autograd; it keeps what it wants
        return None
    node = _behind(state.grad_fn, state.output_nr)
    return node if getattr(node, "replay", None) is not None else None


def rebuilt(ctx: Any) -> Tensor:
    """The first input of the autograd function of `ctx`, which had a `writer`.

    It stays with the node that makes it until that node's own backward pass, because several readers want it.
    Raises RuntimeError where the gradient is to be differentiated again: a rebuilt state has no history.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("a rebuilt state has first derivatives only: use rebuild='none' to differentiate twice")
    node = _behind(*ctx.next_functions[0])
    if node.rebuilt is None:
        node.rebuilt = node.replay(node)
    return node.rebuilt


def cut(state: Any) -> Any:
    """The same state, a tensor or a pytree of them, of which nobody knows how to make it again."""
    return tree_map(lambda x: x.view_as(x), state)


def _behind(node: Any, output: int) -> Any:
    """The node that made an output, behind those that only hand it on."""
    while node is not None and node.name() == HANDS_ON:
        node, output = node.next_functions[output]
    return node
