"""Recompute states in the backward pass instead of keeping them.

The gradient of a write or of a read needs the state before it. A write is linear in the state and needs little else. It
is therefore enough to keep one state in several and to replay the writes since then: the same operations on the same
numbers give the same bits. Autograd's graph records the writes to replay: the input of a write is the output of the
previous write, and the node of that write holds its direction and step.

An autograd function saves its tensors with `save_state` in its forward pass, and gets them back from `release` in its
backward pass. If its result can be recomputed from these tensors, it also passes the function `replay` that does so. A
cheap function of a state, such as one that normalises it, can be replayed too (`ops.derived`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from residua.ops.transforms import Unrecorded

# A chain of writes is followed through these nodes. FSDP2 inserts the first one without changing the tensor; the others
# are views of another shape.
PASSES_THROUGH = ("RegisterPostBackwardFunctionBackward", "ViewBackward0")


def save_state(
    ctx: Any,
    *tensors: Tensor | None,
    inputs: int = 1,
    replay: Callable[..., Tensor] | None = None,
    every: int | None = None,
) -> None:
    """Save tensors for the backward pass of the function of `ctx`, except inputs that other nodes can recompute.

    tensors: the first `inputs` are the function's first tensor arguments, each None if `backward` does not need it
    replay: returns the first result of the function from `tensors`, so that readers of the result need not keep it
    every: the number of writes in a chain per kept state; None for a reader and for a cheap function

    Sets these attributes of the node:
        shapes: of the inputs to recompute; () in a compiled graph, which keeps every tensor that it needs
        age: the number of writes to replay for its result
        replay: None if readers must keep the result
        recomputed: the result, once it has been recomputed
        opened: the saved tensors, once they have been unpacked
        checkpoint: the activation checkpoint in which the function ran
    """
    if isinstance(ctx, Unrecorded):
        return
    ctx.recomputed = ctx.opened = None
    if torch.compiler.is_compiling():
        ctx.shapes = ()
        ctx.save_for_backward(*tensors)
        return
    ctx.checkpoint = _checkpoint()
    makers = [_maker(x, every) for x in tensors[:inputs]]
    ctx.shapes = [None if x is None or maker is None else x.shape for x, maker in zip(tensors, makers)]
    ctx.save_for_backward(*(x if maker is None else None for x, maker in zip(tensors, makers)), *tensors[inputs:])
    ctx.age = max((maker.age for maker in makers if maker is not None), default=0) + (every is not None)
    ctx.replay = replay if every is None or ctx.age < every else None


def release(ctx: Any, needed: Sequence[bool] = ()) -> list[Any]:
    """Return the tensors that `save_state` was given, after recomputing the inputs that were not kept.

    Call it in the backward pass of `ctx`: by then all consumers of the result have run, so the result can be freed. The
    node that made an input holds the recomputed input until that node's own backward pass, for other readers.

    needed: whether to recompute each input; all by default.

    Raises:
        RuntimeError: a second derivative is required and needs the replay of a write; a recomputed state has no
            history.
    """
    ctx.recomputed = None
    saved = _loaded(ctx, needed)
    ctx.opened = None
    return saved


def _loaded(node: Any, needed: Sequence[bool] = ()) -> list[Any]:
    if node.opened is None:  # activation checkpointing unpacks saved tensors only once
        node.opened = node.saved_tensors
    saved = list(node.opened)
    for i, shape in enumerate(node.shapes):
        if shape is not None and (not needed or needed[i]):
            saved[i] = _recomputed(_behind(node.next_functions[i])).view(shape)
    return saved


def is_kept(x: Tensor) -> bool:
    """Return whether a reader must keep x because nothing can recompute it."""
    return _maker(x) is None


def cut(state: Any) -> Any:
    """Return the state, a tensor or a pytree, as the start of a new chain of writes; it will be kept."""
    return tree_map(lambda x: x[...], state)


def expect_first_derivative() -> None:
    """Raise RuntimeError inside a backward pass with `create_graph=True`."""
    if torch.is_grad_enabled():
        raise RuntimeError("a recomputed state has only first derivatives: use recompute='none' to differentiate twice")


def _maker(x: Tensor | None, every: int | None = None) -> Any:
    """Return the node that made x and can recompute it by fewer than `every` writes; None if x must be kept."""
    if x is None or torch.compiler.is_compiling():  # a compiler has no graph of nodes, and keeps tensors itself
        return None
    if x.grad_fn is None or x._version:  # no history, or changed in place since
        return None
    node = _behind((x.grad_fn, x.output_nr))
    if getattr(node, "replay", None) is None or (every is not None and node.age >= every):
        return None
    # Unpacking the saved tensors of a node in another checkpoint would run that layer again, with weights that may
    # already be sharded.
    return node if node.checkpoint in (None, _checkpoint()) else None


def _checkpoint() -> Any:
    """Return the pack hook of the current activation checkpoint; None outside of a checkpoint."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint" else None


def _recomputed(node: Any) -> Tensor:
    """Return the recomputed result of a node, with a history if a second derivative is required."""
    if torch.is_grad_enabled():
        if node.age:
            expect_first_derivative()
        return node.replay(*_loaded(node))
    if node.recomputed is None:
        node.recomputed = node.replay(*_loaded(node))
    return node.recomputed


def _behind(edge: tuple[Any, int]) -> Any:
    """Return the node whose first output is the tensor of this edge, skipping `PASSES_THROUGH`; None without a node."""
    node, output = edge
    while node is not None and node.name() in PASSES_THROUGH:
        node, output = node.next_functions[output]
    return node if output == 0 else None
