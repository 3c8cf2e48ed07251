"""Let `read` and `write` run inside a call of the connection's module, so that hooks run around them.

FSDP gathers a module's parameters, and accelerate's offload brings them back, in hooks on the call of the module. If
`read` and `write` were called directly, no hooks would run. Each is therefore turned into a call of the module, with
the method in place of the sublayer. Within a call around a sublayer both methods run directly, so that a hook that
changes results is applied once.

    connection(state, sublayer)            hooks run around this call; `within` runs both methods inside it
    connection.read(state)                 called directly on a module with hooks; `as_call` turns it into
      connection((args, kwargs), phase)      a call of the module, in which `open_to_phases` runs
        phase(connection, *args, **kwargs)     the method
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.modules import module as modules

from residua.connections.parts.memory import expect_memory, reads_other_tokens
from residua.connections.parts.spec import expect_state


class Phase:
    """A function of a connection, such as `read`, that takes the place of the sublayer in a call of the connection."""

    def __init__(self, method: Callable[..., Any]):
        self.method = method

    def __call__(self, connection: Any, *args: Any, **kwargs: Any) -> Any:
        return self.method(connection, *args, **kwargs)


class ReadPhase(Phase):
    """The `read` of a connection. Raises ValueError for an invalid state, and for a single token without a memory."""

    def __call__(self, connection: Any, *args: Any, **kwargs: Any) -> Any:
        if connection.takes is not None:
            state = args[0] if args else kwargs["state"]
            expect_state(state, connection.takes, sequence=reads_other_tokens(connection))
        x, carry = self.method(connection, *args, **kwargs)
        memory = args[1] if len(args) > 1 else kwargs.get("memory")
        expect_memory(connection, memory, x[0] if isinstance(x, tuple) else x)
        return x, carry


def as_call(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `name` of a connection as a call of its module, so that the module's hooks run around it."""
    phase = ReadPhase(method) if name == "read" else Phase(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(type(self), name) is not call:  # super().read(...) already runs inside a call
            return method(self, *args, **kwargs)
        if is_unobserved(self):  # a call would only add stack frames
            return phase(self, *args, **kwargs)
        return self((args, kwargs), phase)

    call.phase = phase  # type: ignore[attr-defined]
    return call


def within(connection: Any, name: str) -> Callable[..., Any]:
    """Return the method `name` of a connection, for use inside a call of the connection around a sublayer."""
    method = getattr(connection, name)
    phase = getattr(method, "phase", None)
    return method if phase is None else functools.partial(phase, connection)


def is_unobserved(module: Any) -> bool:
    """Return whether a call of `module` would run only its own forward: no hooks, and no replacement."""
    attributes = vars(module)
    return not (
        attributes["_forward_pre_hooks"]
        or attributes["_forward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes["_backward_hooks"]
        or "forward" in attributes
        or module._compiled_call_impl is not None
        or modules._has_any_global_hook()
    )


def open_to_phases(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` of a connection: given a phase as sublayer, it runs the phase with the arguments in `state`."""

    @functools.wraps(forward)
    def call(self: Any, state: Any, sublayer: Any, **options: Any) -> Any:
        if isinstance(sublayer, Phase):
            # A single tensor comes from a `SharedModule`.
            args, kwargs = ((state,), {}) if isinstance(state, Tensor) else state
            return sublayer(self, *args, **kwargs)
        return forward(self, state, sublayer, **options)

    return call


class SharedModule:
    """A module that belongs to another connection, the owner; only the owner registers its parameters.

    If they are elsewhere, in shards or offloaded, it runs inside a call of the owner, whose hooks gather or load them.
    If these hooks change the input or the result, the change is ignored here, except for the input's dtype and device.
    """

    def __init__(self, owner: Any, name: str):
        self.owner, self.name = owner, name

    @property
    def module(self) -> Any:
        return getattr(self.owner, self.name)

    def __call__(self, x: Tensor, *args: Any) -> Any:
        if all(_is_at_hand(parameter, x) for parameter in self.module.parameters()):
            return self.module(x, *args)  # no hook of the owner sees this call, which is not the owner's
        result: Any = None

        def run(_: Any, hooked: Tensor) -> Any:
            nonlocal result
            result = self.module(x.to(hooked), *args)
            return result

        self.owner(x, Phase(run))  # hooks of the owner get a tensor, as around its sublayer
        return result


def _is_at_hand(parameter: Tensor, x: Tensor) -> bool:
    """Return whether a parameter is whole and on the device of x; FSDP shards it, ZeRO-3 empties it."""
    return parameter.device == x.device and parameter.numel() > 0 and not hasattr(parameter, "device_mesh")


def expect_own_parts(connection: Any) -> None:
    """Raise ValueError if a connection runs a part of another one, before `nn.DataParallel` copies it.

    Its copy would run the original part, which is on another device.
    """
    own = {*connection.modules()}
    if any(isinstance(value, SharedModule) and value.owner not in own for value in vars(connection).values()):
        raise ValueError(
            "nn.DataParallel must get a model whose connections share no part, got two that share one; start one "
            "process for each GPU, with torchrun, or let this process see one GPU: CUDA_VISIBLE_DEVICES=0"
        )
