"""Recompute states in the backward pass instead of keeping them.

The gradient of a write or of a read needs the state before it. A write is linear in the state and needs little else, so
it is enough to keep one state in several and to replay the writes since: the same operations on the same numbers, hence
the same bits. Autograd's graph is the record of what to replay: the input of a write is the output of the write before
it, whose node holds the direction and the step.

The first tensor that the node of a write saves is the state before it, or None; `joined` gives the node its attributes.
A cheap function of a state, such as its norm, can be a link of the chain too: `derived`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# FSDP2 inserts this node without changing the tensor, so the chain of writes is followed through it. Readers, and
# writes to fractions of a row, follow it through a view of another shape too.
PASSES_THROUGH = ("RegisterPostBackwardFunctionBackward",)
VIEWS = (*PASSES_THROUGH, "ViewBackward0")


def joined(
    ctx: Any,
    state: Tensor,
    every: int,
    replay: Callable[[Any], Tensor],
    *,
    through: tuple[str, ...] = PASSES_THROUGH,
) -> Tensor | None:
    """Return the state before the write of `ctx`, which the write must save; None if it can be recomputed.

    through: the nodes that may stand between this write and the one before it. Sets on the node: `shape`, of the state;
    `age`, the writes since a kept state, this one included; `replay`, the function from the node to the state it wrote,
    or None if the next write keeps that state; `recomputed`, the state it wrote, after it was recomputed; `opened`,
    its saved tensors, after they were read. One state in `every` is kept.
    """
    before = _maker(state, through) if every > 1 else None
    ctx.shape = state.shape
    steps = 1 if before is None else before.age + 1
    link(ctx, steps, replay if steps < every else None)
    return state if before is None else None


def link(ctx: Any, age: int, replay: Callable[[Any], Tensor] | None) -> None:
    """Give the node of a function the attributes of `joined`, so that its first result need not be kept."""
    ctx.age, ctx.replay = age, replay
    ctx.recomputed = ctx.opened = None


def kept(ctx: Any, x: Tensor) -> Tensor | None:
    """Return the first input x of a reader, a state or a view of it, to save; None if it can be recomputed."""
    if is_kept(x):
        return x
    ctx.shape = x.shape
    return None


def is_kept(x: Tensor) -> bool:
    """Return whether a reader must keep x, because nothing can recompute it."""
    return _maker(x, VIEWS) is None


def derived(ctx: Any, x: Tensor, replay: Callable[[Any], Tensor]) -> Tensor | None:
    """Return the first input x of the function of `ctx`, to save, or None as in `kept`; its result need not be kept.

    `replay` computes the result from the node once more; x itself may be recomputed too. Sets the attributes that
    `joined` sets.
    """
    link(ctx, age(x), replay)
    return kept(ctx, x)


def age(x: Tensor) -> int:
    """Return how many writes must be replayed to recompute x, a state or a function of it."""
    maker = _maker(x, VIEWS)
    return 0 if maker is None else maker.age


def _maker(state: Tensor, through: tuple[str, ...]) -> Any:
    """Return the node that made `state` and can recompute it; None if the state must be kept."""
    if torch.compiler.is_compiling():  # a compiler sees no autograd graph, and decides itself what to keep
        return None
    if state.grad_fn is None or state._version:  # changed in place since it was written, unseen by autograd
        return None
    node = _behind((state.grad_fn, state.output_nr), through)
    return node if getattr(node, "replay", None) is not None else None


def recomputed(ctx: Any) -> Tensor:
    """Return the first input of a write that saved None for it.

    The node that makes it holds it until its own backward pass, for other readers. Raises RuntimeError if the gradient
    itself is to be differentiated: a recomputed state has no history.
    """
    expect_first_derivative()
    return _made_by(_behind(ctx.next_functions[0], VIEWS)).view(ctx.shape)


def read_again(ctx: Any) -> Tensor:
    """Return the first input of a reader for which `kept` returned None, as `recomputed` does.

    The gradient can be differentiated too if that input is `derived` from a tensor that was kept.
    """
    return again(ctx.next_functions[0], ctx.shape)


def again(edge: tuple[Any, int], shape: torch.Size) -> Tensor:
    """Return the tensor of this shape behind the edge of a reader, recomputed."""
    node = _behind(edge, VIEWS)
    if torch.is_grad_enabled() and node.age == 0:
        return node.replay(node).view(shape)
    expect_first_derivative()
    return _made_by(node).view(shape)


def expect_first_derivative() -> None:
    """Raise RuntimeError inside a backward pass with `create_graph=True`."""
    if torch.is_grad_enabled():
        raise RuntimeError("a recomputed state has first derivatives only: use recompute='none' to differentiate twice")


def nearest(node: Any, replay: Callable[[Any], Tensor], reach: int) -> tuple[Tensor, list[Any]]:
    """Return the nearest state before the write of `node`, and the nodes of the writes in between, oldest first.

    A kernel replays these writes at once: at most `reach`, all with this `replay`. If no kept state is within reach,
    the state before these writes is recomputed, and its node holds it as in `recomputed`.
    """
    between: list[Any] = []
    while (state := opened(node)[0]) is None:
        node = _behind(node.next_functions[0], PASSES_THROUGH)
        if node.recomputed is not None or node.replay is not replay or len(between) == reach:
            return _made_by(node), between
        between.insert(0, node)
    return state, between


def opened(node: Any) -> tuple[Any, ...]:
    """Return the saved tensors of a write, read only once: activation checkpointing hands them out only once."""
    if node.opened is None:
        node.opened = node.saved_tensors
    return node.opened


def closed(node: Any) -> tuple[Any, ...]:
    """Return the saved tensors of a link in its backward pass, when every reader of its result has had it."""
    saved = opened(node)
    node.recomputed = node.opened = None
    return saved


def cut(state: Any) -> Any:
    """Return the same state, a tensor or a pytree, detached from the chain of writes, so that it is kept."""
    return tree_map(lambda x: x[...], state)


def _made_by(node: Any) -> Tensor:
    if node.recomputed is None:
        node.recomputed = node.replay(node)
    return node.recomputed


def _behind(edge: tuple[Any, int], through: tuple[str, ...]) -> Any:
    """Return the node whose first output this edge is, or None, looking `through` nodes that only pass it on."""
    node, output = edge
    while node is not None and node.name() in through:
        node, output = node.next_functions[output]
    return node if output == 0 else None
