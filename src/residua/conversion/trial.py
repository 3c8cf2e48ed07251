"""A trial of another residual connection in a model: run, observed, rebuilt and compared, in this order."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from residua.connections import Scheme
from residua.connections.schemes.residual import Residual
from residua.conversion.anatomy import Anatomy, Conversion, Observed, stack_of
from residua.conversion.flow import LayerStream, UnknownUse, layer_streams, release
from residua.conversion.memory import detach
from residua.conversion.probe import Situation, change, situations, small_inputs, uneven
from residua.conversion.rebuild import new_streams, rebuild
from residua.errors import InputError, extra, first_line
from residua.models.dialects import DIALECTS

with extra("lab"):
    from transformers import PreTrainedModel

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""How much an output may change, relative to the largest, where a scheme preserves the model; 0.1 in half precision."""


def tolerance(model: nn.Module, outputs: Sequence[Tensor]) -> float:
    """Return how much the outputs of a model may change: as much as the narrowest of its dtypes allows."""
    # Mamba in half precision returns logits in float32.
    return max(TOLERANCE.get(x.dtype, 0.1) for x in (*outputs, *model.parameters()) if x.is_floating_point())


class Trial:
    """A model in evaluation mode that is converted on trial. If anything is raised inside `with`, it is left as it was.

        with evaluating(model), Trial(model, inputs) as trial:
            conversion = trial.find(scheme)
            trial.rebuild(conversion, most=0.001)

    Every step keeps what it saw, and goes on unless `refusal` finds a reason in that.
    """

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, Any] | None = None):
        self.model = model
        self.path, self.stack = stack_of(model)
        self.ways = situations(model, small_inputs(model, inputs), uneven(model))
        self.first: Situation = next(iter(self.ways.values()))
        self.before: dict[str, list[Tensor]] = {}  # the outputs of the plain model, in every way that it runs
        self.error: Exception | None = None  # what the model or a layer raised
        self.layers: list[Observed] = []
        self.scheme: Scheme | None = None  # over which the model is rebuilt
        self.changes: dict[str, float] = {}  # of the outputs
        self.most = 0.0  # that they may change
        self.fits = True  # whether the scheme reads no later tokens than the model

    @property
    def outputs(self) -> list[Tensor]:
        """Those of the plain model on the small input."""
        return next(iter(self.before.values()))

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self.restore()

    def find(self, scheme: Scheme) -> Conversion:
        """Return how the model can be converted to `scheme`; it is left as it was.

        Raises:
            InputError: it cannot.
        """
        self.run()
        conversion = Conversion(scheme, self.path, self.observe())
        looks_back = any(stream.looks_back for stream in new_streams(self.model, conversion))
        self.rebuild(replace(conversion, scheme=Residual()), most=0)
        self.fits = not looks_back or is_causal(layer_streams(self.stack), self.first)
        self.go_on()
        self.restore()
        return conversion

    def run(self) -> None:
        """Run the model as it is in every way that it can: some have no cache, or take no padding."""
        for way, run in self.ways.items():
            try:
                self.before[way] = run()
            except Exception as error:  # a model that needs other inputs raises anything
                if not self.before:
                    self.error = error
                    break
        self.go_on()

    def observe(self) -> Anatomy:
        """Return what every layer does with its residual, as it runs over the plain one.

        A module that gets the residual reads it. Where a layer does not fit so, the modules in it that read and have
        parts of their own are opened: their parts read, as in blocks that add inside.
        """
        opened: list[set[str]] = [set() for _ in self.stack]
        while True:
            try:
                self.layers = [Observed(layer, names) for layer, names in zip(self.stack, opened)]
                self.first()
                self.error = None
            except Exception as error:  # whatever code of a layer raises that meets no tensor
                self.error = error
            finally:
                release(self.stack)
            last = max((i for i, layer in enumerate(self.layers) if layer.ran), default=0)
            compound = self.layers[last].compound() - opened[last] if self.error else set()
            if not compound:
                break
            opened[last] |= compound
        self.go_on()
        return tuple(layer.sublayers() for layer in self.layers)

    def rebuild(self, conversion: Conversion, *, most: float) -> None:
        """Rebuild the layers, and compare the outputs: in every way if none may change, else on the small input.

        most: how much they may change, relative to the largest; infinity for any change.
        """
        self.scheme, self.most = conversion.scheme, most
        rebuild(self.model, conversion)
        ways = list(self.before) if most == 0 else list(self.before)[:1]
        try:
            self.changes = {way: change(self.before[way], self.ways[way]()) for way in ways}
        except Exception as error:  # a keyword for the layers that the model hands to something else, and the like
            self.error = error
        self.go_on()

    def restore(self) -> None:
        """Give the layers their own code back."""
        detach(self.model, self.stack)
        release(self.stack)

    def go_on(self) -> None:
        """Raise InputError if there is a reason against this conversion."""
        if not (reason := self.refusal()):
            return
        self.restore()
        with suppress(Exception):
            if change(self.outputs, self.first()):
                reason = f"{type(self.model).__name__} must give equal outputs for equal inputs, got different ones"
        raise InputError(reason) from self.error

    def refusal(self) -> str:
        """Return why the model cannot be converted, by what was seen so far, and the remedy if there is one."""
        name, line = type(self.model).__name__, first_line(self.error) if self.error else ""
        if not self.before:
            return f"{name}: could not run it on a small input: {line}"
        if not any(x.isfinite().any() for x in self.outputs):
            return f"{name} must give finite numbers for a small input, got none"
        if len(set(map(id, self.stack))) < len(self.stack):
            return f"{name} must have layers of their own, found one that stands in several places"
        if self.error or not all(layer.ran for layer in self.layers):
            return f"{name}: {self._use(line)}{self._dialect}"
        way, amount = next(((way, x) for way, x in self.changes.items() if x > self.most), ("", 0.0))
        if way and self.most == 0:
            return (
                f"{name}: its layers were rebuilt with the plain residual, and {way} its outputs changed by up to "
                f"{amount:.1e}: they use their residual in a way that is not seen{self._dialect}"
            )
        if way:
            return (
                f"{name}: with this scheme's preserving start its outputs change by {amount:.1e} of the largest one, "
                f"more than {self.most:.0e}; start='fresh' converts it all the same"
            )
        if not self.fits:
            return (
                "connection must be a scheme that reads single tokens, got one that reads earlier ones; "
                f"{name} reads in both directions"
            )
        return ""

    def _use(self, line: str) -> str:
        """Return how a layer uses its residual otherwise than the plain way; line: that of the error."""
        use = self.error.use if isinstance(self.error, UnknownUse) else ""
        if self.scheme is not None:
            return f"a layer {use or f'cannot run rebuilt: {line}'}"
        if self.error and not use:
            return f"a layer needs its residual as a tensor: {line}"
        ran = [i for i, layer in enumerate(self.layers) if layer.ran]
        i = max(ran, default=0) if self.error else min(set(range(len(self.layers))) - {*ran})
        return f"layer {i} ({type(self.stack[i]).__name__}) {line or 'did not run'}"

    @property
    def _dialect(self) -> str:
        """Where to look for a residual of a released model that is not the plain one."""
        kind = self.model.config.get_text_config().model_type.removesuffix("_text")
        return "; residua.models.dialects knows this residual and loads its parameters" if kind in DIALECTS else ""


def is_causal(streams: Sequence[LayerStream], run: Situation) -> bool:
    """Return whether the residual before the last token ignores the last token, in a model over the plain residual.

    Its gradient says so exactly; the numbers do not where tokens are computed in groups, as by experts.
    """
    ends: list[Tensor] = []

    def begin(_: nn.Module, args: Any) -> Any:
        ends.append(args[0].detach().requires_grad_())
        return (ends[0], *args[1:])

    parts: list[Any] = [streams[0].expand, streams[-1].collapse]
    hooks = [
        parts[0].register_forward_pre_hook(begin),
        parts[1].register_forward_hook(lambda module, args, x: ends.append(x)),
    ]
    try:
        with torch.enable_grad():
            run()
            x = ends[-1][:, :-1]
            weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
            (gradient,) = torch.autograd.grad((x * weights).sum(), ends[0])
    finally:
        for hook in hooks:
            hook.remove()
    return not gradient[:, -1].any()
