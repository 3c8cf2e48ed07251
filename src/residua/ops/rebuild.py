"""States that the backward pass makes again instead of keeping.

A write needs the state before it, and so does a read, when their gradients are computed. Between writes the state
changes by rank one, so it is enough to keep it now and then and to replay the writes that followed: the same operations
on the same numbers, hence the same bits. The graph of autograd is the record of what to replay: the input of a write is
the output of the write before it, whose node holds the direction and the step.

The node of a write saves the state before it first, or None for it, and has the attributes that `joined` gives it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# What marks the inputs of a module for FSDP2 hands them on as they are; a state is followed through it.
HANDS_ON = "RegisterPostBackwardFunctionBackward"


def joined(ctx: Any, state: Tensor, every: int, replay: Callable[[Any], Tensor]) -> Tensor | None:
    """What the write of `ctx` is to save of the state before it: None where that can be made again.

    age      the writes since a state was kept, this one included: one of `every` states in a row is
    replay   from the node to the state it wrote; None where the writes that follow keep that
    rebuilt  the state it wrote, once that was made again; opened: what it saved, once that was asked for
    """
    before = writer(state) if every > 1 else None
    ctx.age = 1 if before is None else before.age + 1
    ctx.replay = replay if ctx.age < every else None
    ctx.rebuilt = ctx.opened = None
    return state if before is None else None


def writer(state: Tensor) -> Any:
    """The node of the write that made `state` and can make it again, so that nobody has to keep it; else None."""
    if torch.compiler.is_compiling():  # a compiler sees no graph of autograd; it keeps what it wants
        return None
    if state.grad_fn is None or state._version:  # changed in place since it was written, unseen by autograd
        return None
    node = _behind(state.grad_fn, state.output_nr)
    return node if getattr(node, "replay", None) is not None else None


def rebuilt(ctx: Any) -> Tensor:
    """The first input of the autograd function of `ctx`, which had a `writer`.

    It stays with the node that makes it until that node's own backward pass, because several readers want it.
    Raises RuntimeError where the gradient is to be differentiated again: a rebuilt state has no history.
    """
    expect_first_derivative()
    return _made_by(_behind(*ctx.next_functions[0]))


def expect_first_derivative() -> None:
    """RuntimeError inside a backward pass whose results are to be differentiated themselves (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise RuntimeError("a rebuilt state has first derivatives only: use rebuild='none' to differentiate twice")


def nearest(node: Any, replay: Callable[[Any], Tensor], reach: int) -> tuple[Tensor, list[Any]]:
    """The latest state at hand before the write of `node`, and the nodes of the writes between the two, oldest first.

    For several writes replayed at once: those of at most `reach` nodes, all with this `replay`. Where they do not lead
    to a state that exists, the one before them is made, and stays with its node as in `rebuilt`.
    """
    between: list[Any] = []
    while (state := opened(node)[0]) is None:
        node = _behind(*node.next_functions[0])
        if node.rebuilt is not None or node.replay is not replay or len(between) == reach:
            return _made_by(node), between
        between.insert(0, node)
    return state, between


def opened(node: Any) -> tuple[Any, ...]:
    """The tensors that a write has saved, or None: asked for once, as activation checkpointing hands them out once."""
    if node.opened is None:
        node.opened = node.saved_tensors
    return node.opened


def cut(state: Any) -> Any:
    """The same state, a tensor or a pytree of them, of which nobody knows how to make it again."""
    return tree_map(lambda x: x.view_as(x), state)


def _made_by(node: Any) -> Tensor:
    if node.rebuilt is None:
        node.rebuilt = node.replay(node)
    return node.rebuilt


def _behind(node: Any, output: int) -> Any:
    """The node whose first output this is, behind those that only hand it on; None where there is none."""
    while node is not None and node.name() == HANDS_ON:
        node, output = node.next_functions[output]
    return node if output == 0 else None
