"""The interface of the library: a residual connection is everything between the state and a sublayer.

A sublayer is bare attention or a bare MLP, any map (batch, seq, dim) -> (batch, seq, dim). It knows no residual. A
connection owns the norm before the sublayer and works in two phases around it:

    x, carry = connection.read(state)             the sublayer's input, and the carry for `write`
    state = connection.write(sublayer(x), carry)  the state with the sublayer's output written into it

The state is an opaque pytree of tensors: (batch, seq, dim), (batch, seq, streams, dim), or a tuple that grows with
depth. Only the scheme looks inside. All other code asks the scheme or the connection: `Scheme.state_spec` for shapes,
`Connection.shortcut` for the linear map that was applied to the state, `Connection.depth_weights` for the weights on
earlier sublayers, `Connection.streams` for the streams as one tensor.
"""

import inspect
import math
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from residua.connections.parts.facts import DepthWeights, GateFacts, Mixing, RankOne
from residua.connections.parts.memory import (
    Memory,
    Place,
    StreamMemory,
    expect_memory,
    expect_once,
    finite_at_padding,
    give_places,
    memory_of,
    no_sequence,
    reads_other_tokens,
    tokens_of,
    whole_piece,
    window_of,
)
from residua.connections.parts.norm import RMSNorm
from residua.connections.parts.options import DIVIDES_WIDTH, check_options, require_option
from residua.connections.parts.phases import as_call, expect_own_parts, open_to_phases, within
from residua.connections.parts.projection import LINEAR_MAPS, WideProjection
from residua.connections.parts.sharded import SelfStarting
from residua.connections.parts.spec import TensorSpec
from residua.errors import keywords, ranges_of, require
from residua.ops.precision import at_least_float32
from residua.ops.shapes import expect_shape

State = Any  # a pytree of tensors
Norm = Callable[[int], nn.Module]  # from the index of a sublayer to the norm before it


class Carry(NamedTuple):
    """The data that `read` passes to `write`: the state to update, and the coefficients.

    The coefficients are a NamedTuple of tensors, which telemetry reads too.
    """

    residual: State
    coefficients: Any


class Connection(SelfStarting, ABC):
    """One residual connection around one sublayer. `read` and `write` store nothing on the module.

    Both always run inside a call of the module. Hooks on a connection, such as those that gather, move or offload its
    parameters, therefore run once around a call with a sublayer, and once around a phase that is called directly. So
    that hooks on submodules run too, a connection calls its submodules and never reads their parameters.
    """

    takes: Any = None  # the `Scheme.state_spec` of the state before this connection; `Scheme.build` sets it
    causal: bool = True  # `Scheme.causal`: whether `read` ignores later tokens; `Scheme.build` sets it
    place: Place | None = None  # position in the stream; `Stream` sets it
    single_input: str = "with one input for all"  # for an error: the option with which every sublayer takes one input
    window: int = 0  # how many earlier tokens `read` needs from its memory; 1 for a sum over all of them

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        for name in ("read", "write"):
            method = getattr(cls, name)
            if not hasattr(method, "phase"):
                setattr(cls, name, as_call(name, method))
        if "forward" in vars(cls):
            cls.forward = open_to_phases(cls.forward)  # type: ignore[method-assign]

    def _replicate_for_data_parallel(self) -> Any:
        expect_own_parts(self)
        return super()._replicate_for_data_parallel()

    @abstractmethod
    def read(self, state: State, memory: Memory | None = None) -> tuple[Any, Carry]:
        """Return the normalised sublayer input, and the `Carry` for `write` with all state-dependent coefficients.

        The input is (batch, seq, dim), or a tuple of such tensors for a sublayer that takes several (q, k, v).
        """

    @abstractmethod
    def write(self, y: Tensor, carry: Carry) -> State:
        """Return the next state, from the sublayer's output y: (batch, seq, dim) and the carry."""

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> RankOne | Mixing | None:
        """Return the linear map that this connection applies to `state`, for spectra and telemetry.

        state: the input of `read`; carry: the carry that `read` returned; y: the sublayer's output. If the result is
        None, only norms are measured.
        """
        return None

    def depth_weights(self, carry: Carry) -> DepthWeights | None:
        """Return the weights with which `read` gathered its sources, for telemetry; `carry` comes from `read`.

        None if `read` used the state as the previous connection left it.
        """
        return None

    def streams(self, state: State) -> Tensor | None:
        """Return the n streams of a state before or after this connection as one tensor, (batch, seq, n, dim).

        None if there are no streams. By default, a state that `state_spec` describes as one tensor (n, dim) is
        returned.
        """
        return state if isinstance(self.takes, TensorSpec) and len(self.takes.shape) == 2 else None

    def penalty(self, coefficients: Any) -> Tensor | None:
        """Return the auxiliary loss of each token, (batch, seq or 1), or a scalar for all; None for most schemes.

        A model averages a loss of each token over the tokens that are not padding, and adds a scalar unchanged.
        Therefore do not return a mean over the tokens as a scalar: it would count padding.
        """
        return None

    @open_to_phases
    def forward(
        self,
        state: State,
        sublayer: Callable[..., Tensor],
        *,
        memory: StreamMemory | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> State:
        """Return the state after this connection around `sublayer`, which maps (batch, seq, dim) to the same shape.

        If a sequence arrives in pieces, as in generation, pass the same `memory` with every piece.
        attention_mask: (batch, seq), 0 at padding and 1 at tokens.
        documents: (batch, seq), integers, if rows hold several documents: the tokens of a document share a number.

        Raises:
            TypeError, ValueError: the sublayer does not return a tensor of this shape, or takes fewer inputs than
                `read` returns; a single token arrives without the memory that this scheme needs; or the mask, the
                documents or the memory do not fit x or the scheme.
        """
        expect_callable("sublayer", sublayer)
        x, carry = within(self, "read")(state, memory_of(self, memory, attention_mask, documents))
        inputs = as_inputs(x)
        if len(inputs) > 1 and not torch.compiler.is_compiling():
            require_inputs(sublayer, len(inputs), self.single_input)
        if documents is None:
            expect_memory(self, memory, inputs[0])
        y = sublayer(*inputs)
        if not isinstance(y, Tensor):
            wrap = "wrap it, e.g. `lambda x: sublayer(x)[0]`"
            raise TypeError(f"sublayer must return a tensor, got {type(y).__name__}; {wrap}")
        expect_shape("the sublayer's output", y, inputs[0].shape, "the shape of its input")
        return within(self, "write")(y, carry)


def as_inputs(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the arguments of a sublayer, given the x that `read` returned."""
    return x if isinstance(x, tuple) else (x,)


def require_inputs(sublayer: Callable[..., Tensor], count: int, remedy: str) -> None:
    """Raise TypeError unless `sublayer` can be called with `count` inputs: queries, keys and values."""
    function = sublayer.forward if isinstance(sublayer, nn.Module) else sublayer
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(*range(count))
    except TypeError:
        name = type(sublayer).__name__ if isinstance(sublayer, nn.Module) else getattr(sublayer, "__name__", "sublayer")
        raise TypeError(
            f"sublayer must take {count} inputs, because this scheme reads queries, keys and values separately, got "
            f"{name}{signature}; give it the arguments (q, k, v), or give the scheme the option {remedy}"
        ) from None


def expect_callable(name: str, sublayer: object) -> None:
    """Raise TypeError for a sublayer that cannot be called."""
    if not callable(sublayer):
        raise TypeError(f"{name} must be a module or a function, got {type(sublayer).__name__}")


def expect_sublayers(sublayers: Any, count: int) -> None:
    """Raise TypeError or ValueError unless `sublayers` are a list of `count` callables."""
    if not (hasattr(sublayers, "__len__") and hasattr(sublayers, "__iter__")):
        hint = f"for the same module {count} times pass [module] * {count}" if callable(sublayers) else "pass list(...)"
        raise TypeError(
            f"sublayers must be a list, one sublayer per connection, got {type(sublayers).__name__}; {hint}"
        )
    if len(sublayers) != count:
        raise ValueError(f"sublayers must be {count}, one per connection, got {len(sublayers)}")
    for i, sublayer in enumerate(sublayers):
        expect_callable(f"sublayers[{i}]", sublayer)


def expect_embeddings(x: Any, dim: int | None) -> None:
    """Raise TypeError or ValueError unless x is a floating-point tensor (..., dim)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, the embeddings (batch, seq, dim), got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"x must be the embeddings of the tokens, a floating-point tensor, got {x.dtype}")
    if dim is not None and (not x.dim() or x.shape[-1] != dim):
        hint = ""
        if x.dim() > 2 and x.shape[1] == dim:
            hint = f"; move the features to the last axis: {'x.mT' if x.dim() == 3 else 'x.flatten(2).mT'}"
        raise ValueError(f"x must be (batch, seq, dim) with dim = {dim}, got {tuple(x.shape)}{hint}")


class WideParts(nn.Module):
    """Base of a stream and of its parts: the parameters of gates, mappings and filters stay in float32."""

    connections: nn.ModuleList

    def float32_parameters(self) -> list[str]:
        """Return the names of the parameters that must stay in float32 if a model is narrowed or quantised.

        They belong to gates, mappings and filters, and to further norms of keys and values. All other parameters belong
        to the norms before the sublayers, and to linear maps that compute in the dtype of their weights, as sublayers
        do.
        """
        norms = {id(part) for c in self.connections for part in getattr(c, "norm", nn.Identity()).modules()}
        names = []
        for name, module in self.named_modules():
            narrow = isinstance(module, LINEAR_MAPS) and not isinstance(module, WideProjection)
            if not narrow and id(module) not in norms:
                parameters = module.named_parameters(prefix=name, recurse=False)
                names += [parameter for parameter, _ in parameters]
        return names

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `fn` as `nn.Module` does; warn if `to`, `half` or `bfloat16` narrows gates and mappings."""
        names = [name for name in self.float32_parameters() if self.get_parameter(name).dtype == torch.float32]
        super()._apply(fn, recurse)
        narrow = [name for name in names if self.get_parameter(name).dtype in (torch.bfloat16, torch.float16)]
        if narrow:
            warnings.warn(
                f"the {len(narrow)} parameters of gates and mappings must stay in float32, got "
                f"{self.get_parameter(narrow[0]).dtype}; use torch.autocast instead of converting the model, or "
                "convert only the parameters that stream.float32_parameters() does not name",
                stacklevel=2,
            )
        return self


class Stream(WideParts):
    """A built scheme: `expand` makes the state, `connections` (one per sublayer) update it, `collapse` reads it out.

    `expand` and `collapse` take two arguments: their input, and a `Memory` or None.
    """

    scheme: "Scheme | None" = None  # the scheme that built this stream; `Scheme.build` sets it and the width
    dim: int | None = None

    def __init__(self, expand: nn.Module, connections: Sequence[Connection], collapse: nn.Module):
        super().__init__()
        self.expand = expand
        self.connections = nn.ModuleList(connections)
        self.collapse = collapse
        give_places(self.parts)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        give_places(self.parts)  # for parts that were pickled without a place

    @property
    def parts(self) -> list[nn.Module]:
        """The parts that may need a memory (`window` above 0): expand, every connection and collapse, in this order."""
        return [self.expand, *self.connections, self.collapse]

    @keywords
    def param_groups(self, *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Return the trainable parameters as groups for a torch optimizer.

        Weights of linear maps are decayed. Gains, biases, taps of convolutions and read vectors of any shape are not
        decayed, because they need not be small.
        """
        matrices = {id(module.weight) for module in self.modules() if isinstance(module, LINEAR_MAPS)}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in self.parameters():
            if parameter.requires_grad:
                groups[id(parameter) in matrices].append(parameter)
        return [
            {"params": parameters, "lr": lr, "weight_decay": weight_decay if decayed else 0.0}
            for decayed, parameters in groups.items()
            if parameters
        ]

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        built = "" if self.scheme is None else f"{self.scheme}, dim={self.dim}, "
        return f"Stream({built}{len(self.connections)} sublayers, {count:,} parameters)"

    def forward(
        self,
        x: Tensor,
        sublayers: Sequence[Callable[..., Tensor]],
        *,
        memory: StreamMemory | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Run x: (batch, seq, dim) through all sublayers; return (batch, seq, dim), not normalised.

        A scheme that reads each token independently takes any (..., dim). `memory`, `attention_mask` and `documents`
        are as in `Connection.forward`.

        Raises:
            TypeError, ValueError: x has the wrong shape or dtype; `sublayers` is not a list of callables, one per
                connection; or an error of `Connection.forward`.
        """
        expect_sublayers(sublayers, len(self.connections))
        expect_embeddings(x, self.dim)
        if x.dim() != 3 and any(map(reads_other_tokens, self.parts)):
            raise ValueError(no_sequence(tuple(x.shape)))
        if documents is None:
            expect_memory(self.expand, memory, x)
        if memory is not None:
            expect_once(self.parts)
        if attention_mask is not None and any(map(window_of, self.parts)):
            attention_mask = tokens_of(attention_mask)  # once: each part reads a boolean mask as it is
            x = finite_at_padding(x, attention_mask)
        with whole_piece(memory):
            state = self.expand(x, memory_of(self.expand, memory, attention_mask, documents))
            for connection, sublayer in zip(self.connections, sublayers):
                state = connection(state, sublayer, memory=memory, attention_mask=attention_mask, documents=documents)
            return self.collapse(state, memory_of(self.collapse, memory, attention_mask, documents))


def counted(name: str, value: Any, least: int) -> int:
    """Return an argument that must be a whole number of at least `least`. Raises InputError otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    require(
        number >= least, name, "a positive integer" if least else "an integer from 0, such as len(sublayers)", value
    )
    return number


@dataclass(frozen=True)
class Scheme(ABC):
    """A residual scheme with all its options: a frozen dataclass that is its own configuration.

    title, equation, paper, users: shown by `residua schemes`; users: the models and code that use the scheme, with
        their sources. `source`, which may depend on the options, is shown in place of paper.
    constraint: the constraint on h_res of a `Mixing`, "doubly stochastic" or "orthogonal"; None for no constraint.
    derived: for each option that may be None, the options from which its value is then derived.
    published: the options of which every value belongs to a published version of the scheme. `check_module` accepts a
        module that agrees with any of these versions, and names the version.
    activations: coefficients that are computed like a sublayer, in the dtype of autocast. All others are gates and
        mappings, in at least float32.
    """

    title: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    users: ClassVar[str] = ""
    constraint: ClassVar[str | None] = None
    derived: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    published: ClassVar[tuple[str, ...]] = ()
    activations: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = Scheme.__repr__  # type: ignore[method-assign]  # so that `dataclass` does not write one

    def __repr__(self) -> str:
        """Return Python code that makes an equal scheme: the class with the options that differ from its defaults."""
        in_order = sorted(fields(self), key=lambda field: bool(field.kw_only))  # the constructor's order
        values = ((field.name, getattr(self, field.name), field.default) for field in in_order)
        changed = (f"{name}={value!r}" for name, value, default in values if value != default)
        return f"{type(self).__name__}({', '.join(changed)})"

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def source(self) -> str:
        """Return the source of these options, such as "arXiv 2601.00417" or "ours, after arXiv 2601.00417"."""
        return self.paper

    @property
    def causal(self) -> bool:
        """Whether the result at a token depends only on this and earlier tokens, as a language model requires."""
        return True

    @property
    def gates(self) -> Mapping[str, GateFacts]:
        """The range and initial value of each gate of a shortcut, by name; a gate with neither needs no entry."""
        return {}

    @property
    def residual_start(self) -> Mapping[str, Any] | str:
        """The options that `preserving` sets; if the scheme cannot start as the plain residual, the reason, or ""."""
        return ""

    def state_spec(self, boundary: int, dim: int) -> Any:
        """Describe the state after `boundary` sublayers of width `dim`: a pytree of `TensorSpec`, one per tensor.

        Boundary 0 is the state that `expand` makes. Memory estimates count these tensors.
        """
        return TensorSpec((dim,))

    def state_size(self, boundary: int, dim: int) -> int:
        """Return how many numbers per token the state holds after `boundary` sublayers."""
        return sum(math.prod(spec.shape) for spec in tree_leaves(self.state_spec(boundary, dim)))

    def preserving(self) -> "Scheme":
        """Return this scheme with options such that its initial stream computes exactly the plain pre-norm residual.

        A pretrained model whose residual is replaced by this stream keeps its outputs, whatever its norms and sublayers
        are. In every connection, all parameters that training needs have a gradient.

        Raises:
            ValueError: the scheme cannot start as the plain residual; the message says why.
        """
        start = self.residual_start
        if isinstance(start, str):
            reason = f": {start}" if start else ""
            raise ValueError(f"{type(self).__name__}: no start preserves the plain residual{reason}")
        return replace(self, **start)

    def build(self, dim: int, num_sublayers: int, *, norm_eps: float = 1e-5, norm: Norm | None = None) -> Stream:
        """Build the initialised modules for a stack of `num_sublayers` sublayers of width `dim`.

        norm: a function from i to the norm before sublayer i; None for RMSNorm with `norm_eps`.
        norm_eps: also the eps of the norms inside the connections.

        Raises:
            ValueError: `dim` is no positive integer, `num_sublayers` is no integer from 0, or the options do not fit
                this width.
            TypeError: `norm` is not callable.
        """
        dim, num_sublayers = counted("dim", dim, 1), counted("num_sublayers", num_sublayers, 0)
        if norm is not None and (isinstance(norm, nn.Module) or not callable(norm)):
            raise TypeError(
                "norm must be a function from the number of a sublayer to the norm before it, got "
                f"{type(norm).__name__}; write norm=lambda i: nn.LayerNorm({dim})"
            )
        for name, ranges in ranges_of(type(self)).items():
            if DIVIDES_WIDTH in ranges:
                require_option(self, name, dim % getattr(self, name) == 0, f"a divisor of the width dim = {dim}")
        if norm is None:
            norm = partial(self.default_norm, dim, norm_eps)
        stream = self.assemble(dim, num_sublayers, norm, norm_eps)
        stream.scheme, stream.dim = self, dim
        for name in stream.float32_parameters():  # a model can be built in a narrow default dtype
            parameter = stream.get_parameter(name)
            parameter.data = at_least_float32(parameter.data)
        connection: Any
        for i, connection in enumerate(stream.connections):
            connection.takes, connection.causal = self.state_spec(i, dim), self.causal
        return stream

    @abstractmethod
    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        """Return the stream; `build` calls this with its own arguments, after it has checked them."""

    def default_norm(self, dim: int, eps: float, index: int) -> nn.Module:
        """Return the norm before sublayer `index`, for a `build` without `norm`."""
        return RMSNorm(dim, eps=eps)
