"""Initialise a module's parameters by its own rule, even if an engine shards them or the model re-initialises them.

An engine builds a model on the meta device, shards it with `fully_shard`, gives it memory with `to_empty`, and calls
`reset_parameters` of every module. The parameters are then `DTensor`s: writing to a slice such as `taps[0]` may have no
effect, because it can be a copy, and each rank would draw other numbers than a single process.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def on_whole_tensors(reset: Callable[[Module], None]) -> Callable[[Module], None]:
    """Wrap a `reset_parameters` so that it fills whole tensors, and each rank keeps its own shard.

    Rank 0 fills the whole tensors as a single process would. On the meta device nothing is drawn, because drawing there
    is slow and imports torch's compiler.
    """

    @functools.wraps(reset)
    def call(module: Module) -> None:
        parameters = dict(module.named_parameters(recurse=False))
        if any(x.is_meta for x in parameters.values()):
            return
        sharded = {name: x for name, x in parameters.items() if hasattr(x, "device_mesh")}
        if not sharded:
            reset(module)
            mark_start(parameters.values())
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


def mark_start(parameters: Iterable[Any]) -> None:
    """Record that these parameters have their initial values, by the version counter of each tensor."""
    for parameter in parameters:
        if not parameter.is_inference():
            parameter.started_at = parameter._version


def is_at_start(parameter: Any) -> bool:
    """Return whether a parameter is unchanged since its module initialised it."""
    started = getattr(parameter, "started_at", None)
    return started is not None and not parameter.is_inference() and started == parameter._version


class SelfStarting(nn.Module):
    """A module that initialises its own parameters, in `reset_parameters`, and protects them from a model's `init`.

    Many models end their `__init__` with `self.apply(init)`, where `init` fills every linear map; transformers does the
    same for weights that a checkpoint lacks. Only initial values are protected: parameters that were loaded or trained
    change as in every module. `reset_parameters` fills whole tensors, even if an engine has sharded them.
    """

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        reset: Any = vars(cls).get("reset_parameters")
        if reset is not None:
            cls.reset_parameters = on_whole_tensors(reset)  # type: ignore[attr-defined]

    def apply(self, fn: Callable[[nn.Module], Any]) -> Any:
        """Apply `fn` as `nn.Module` does, but restore initial values that `fn` replaces, and warn.

        If `fn` calls `reset_parameters`, the parameters keep the new initial values.
        """
        started: dict[str, Any] = {name: p for name, p in self._parameters.items() if p is not None and is_at_start(p)}
        before = {name: (p.detach().clone(), p.started_at) for name, p in started.items()}
        super().apply(fn)
        replaced = []
        for name, (value, mark) in before.items():
            parameter: Any = self._parameters.get(name)
            same = parameter is started[name] and parameter.dtype == value.dtype and parameter.shape == value.shape
            reset = is_at_start(started[name]) and started[name].started_at != mark
            if same and not reset and not torch.equal(parameter, value.to(parameter.device)):
                with torch.no_grad():
                    parameter.copy_(value)
                mark_start([parameter])
                replaced.append(name)
        if replaced:
            warnings.warn(
                "connections keep their own initial parameters, which "
                f"apply({getattr(fn, '__name__', 'fn')}) would have replaced; build the stream after this call, or "
                "loop over stream.modules() if you want to replace them",
                stacklevel=2,
            )
        return self

    @property
    def _is_hf_initialized(self) -> bool:
        """Whether transformers skips this module when it fills modules with a model's `_init_weights`.

        If so, the module itself initialises the parameters that the checkpoint lacks.
        """
        caller = sys._getframe(1)
        marked: bool | None = vars(self).get("_hf_initialized")
        if caller.f_code.co_name != "_initialize_weights" or marked is not None:
            return bool(marked)
        if getattr(caller.f_locals.get("self"), "starts_modules", False):  # our own models
            return False
        return start_missing(self)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        vars(self)["_hf_initialized"] = value


def start_missing(module: nn.Module) -> bool:
    """Initialise `module`'s own parameters and buffers, without those of its submodules, if they were not loaded.

    Return whether this is possible: the module has `reset_parameters`, or no parameters of its own.
    """
    reset: Any = getattr(module, "reset_parameters", None)
    parameters: list[Any] = [p for p in module._parameters.values() if p is not None]
    if reset is None:
        return not parameters
    started = [p for p in parameters if is_at_start(p)]
    kept = [p for p in parameters if getattr(p, "_is_hf_initialized", False) or is_at_start(p)]
    if len(kept) < len(parameters) or module._buffers:
        values = [p.detach().clone() for p in kept]
        reset()
        with torch.no_grad():
            for parameter, value in zip(kept, values):
                parameter.copy_(value)
        mark_start(started)
    return True
