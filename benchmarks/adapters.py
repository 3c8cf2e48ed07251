"""Other packages' implementations of schemes that we have: how each is built, called, and given our parameters.

An adapter (`residua.testing`) serves twice: the kit checks the module against our scheme, and the benchmark runs it.
"""

import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from residua.connections import (
    AttentionResiduals,
    DeepSeekHyperConnections,
    HyperConnections,
    IndependentHyperConnections,
    ManifoldHyperConnections,
)
from residua.testing import ConnectionAdapter

STREAMS = 4


class PeerAdapter(ConnectionAdapter):
    """Call a peer on `device`, wherever the state is. The norm before the sublayer is left out on both sides."""

    owns_norm = False

    def __init__(self, imported: Any, device: str):
        self.imported, self.device = imported, device

    def module(self, dim: int) -> nn.Module:
        """Return the peer's module, freshly initialised."""
        raise NotImplementedError

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the values of its parameters."""
        raise NotImplementedError

    def step(self, module: nn.Module, state: Any, sublayer: Callable[..., Tensor]) -> Any:
        """Return the state after it."""
        raise NotImplementedError

    def build(self, dim: int) -> nn.Module:
        return self.module(dim).to(self.device)

    def parameters(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: value.to(self.device) for name, value in self.values(ours).items()}

    def connect(self, module: nn.Module, state: Any, sublayer: Callable[..., Tensor]) -> Any:
        place = (state[0] if isinstance(state, tuple) else state).device
        if place.type == self.device:
            return self.step(module, state, sublayer)
        moved = tree_map(lambda x: x.to(self.device), state)
        after = self.step(module, moved, lambda x: sublayer(x.to(place)).to(self.device))
        return tree_map(lambda x: x.to(place), after)


class LucidrainsHC(PeerAdapter):
    """`hyper_connections.HyperConnections`, whose streams are beside the batch."""

    scheme = HyperConnections(num_streams=STREAMS)
    norm_eps = 0.0

    def module(self, dim: int) -> nn.Module:
        return self.imported.HyperConnections(STREAMS, dim=dim, layer_index=self.index)

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        weight, (alpha, beta) = ours["project.weight"], ours["scales"].unbind()
        return {
            "static_alpha": ours["alpha"],
            "dynamic_alpha_fn": weight[:-1].T,
            "dynamic_alpha_scale": alpha,
            "static_beta": ours["beta"],
            "dynamic_beta_fn": weight[-1],
            "dynamic_beta_scale": beta,
            "norm.gamma": ours["stream_norm.weight"] - 1,
        }

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        x, write = module(state.movedim(-2, 1).flatten(0, 1))
        return write(sublayer(x)).unflatten(0, (state.shape[0], STREAMS)).movedim(1, -2)


class LucidrainsMHC(LucidrainsHC):
    """`hyper_connections.mHC`. Its constant logits are ours; nothing of ours fits its maps of single streams."""

    scheme = ManifoldHyperConnections(num_streams=STREAMS)
    dtype = torch.float32

    def module(self, dim: int) -> nn.Module:
        return self.imported.mHC(STREAMS, dim=dim, layer_index=self.index)

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        n, alpha = STREAMS, ours["mappings.alpha"]
        pre, post, res = ours["mappings.bias"].split([n, n, n * n])
        return {
            "static_alpha": torch.cat([pre.unsqueeze(-1), res.view(n, n).T], -1),
            "dynamic_alpha_fn": alpha.new_zeros(1, self.dim, n + 1),
            "pre_branch_scale": alpha[:1],
            "residual_scale": alpha[2:],
            "static_beta": post,
            "dynamic_beta_fn": alpha.new_zeros(self.dim),
            "h_post_scale": alpha[1],
            "norm.gamma": alpha.new_zeros(self.dim),
        }


class HistorySkip(PeerAdapter):
    """`mhc.MHCSkip`, which mixes the last n states: ours are its history, and its result becomes the newest."""

    scheme = ManifoldHyperConnections(num_streams=STREAMS)

    def module(self, dim: int) -> nn.Module:
        return self.imported.MHCSkip(mode="mhc", max_history=STREAMS)

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"mixing_logits": ours["mappings.bias"][2 * STREAMS :].view(STREAMS, STREAMS)[-1]}

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        history = list(state.unbind(-2))
        return torch.stack([*history[1:], module(sublayer(history[-1]), history)], -2)


class LigerMHC(PeerAdapter):
    """`liger_kernel.transformers.mhc.LigerMHC`, which owns its sublayer."""

    scheme = ManifoldHyperConnections(num_streams=STREAMS)
    norm_eps, dtype = 1e-6, torch.float32

    class Slot(nn.Module):
        """A sublayer that comes with each call."""

        def forward(self, x: Tensor) -> Tensor:
            return self.sublayer(x)  # type: ignore[operator]

    def module(self, dim: int) -> nn.Module:
        return self.imported.LigerMHC(self.Slot(), hc=STREAMS, c=dim, phi_dtype=torch.float32, allow_fp32=True)

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        pre, post, res = ours["mappings.alpha"].unbind()
        return {
            "phi": ours["mappings.phi.weight"].T.contiguous(),
            "b": ours["mappings.bias"],
            "alpha_pre": pre,
            "alpha_post": post,
            "alpha_res": res,
        }

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        vars(module.layer)["sublayer"] = sublayer
        return module(state.contiguous()).to(state.dtype)


class _Depth(PeerAdapter):
    """An operation of depth attention, with a query and a gain for its keys."""

    scheme = AttentionResiduals()
    norm_eps, dtype = 1e-6, torch.float32

    class Read(nn.Module):
        def __init__(self, dim: int):
            super().__init__()
            self.query, self.gain = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.ones(dim))

    def module(self, dim: int) -> nn.Module:
        return self.Read(dim)

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"query": ours["attend.query"], "gain": ours["attend.gain"]}

    def attend(self, module: nn.Module, sources: tuple[Tensor, ...]) -> Tensor:
        raise NotImplementedError

    def step(self, module: nn.Module, state: tuple[Tensor, ...], sublayer: Callable[..., Tensor]) -> Any:
        return (*state, sublayer(self.attend(module, state)))


class NaiveAttnRes(_Depth):
    """`fla.ops.attnres.naive_attnres`."""

    operation = "naive_attnres"

    def attend(self, module: nn.Module, sources: tuple[Tensor, ...]) -> Tensor:
        operation = getattr(self.imported, self.operation)
        return operation(module.query, sources, module.gain, rms_eps=self.norm_eps)


class FusedAttnRes(NaiveAttnRes):
    """`fla.ops.attnres.fused_attnres`."""

    operation = "fused_attnres"


class FlashAttnRes(_Depth):
    """`flash_attn_res`, whose result is bfloat16."""

    dtype = torch.bfloat16

    def attend(self, module: nn.Module, sources: tuple[Tensor, ...]) -> Tensor:
        query = (module.query * module.gain).unsqueeze(0)
        return self.imported.phase_1_batched_attention_triton_op(torch.stack(sources), query, self.norm_eps)[0][0]


class AttnRes(_Depth):
    """`attn_res.AttnResOperator`, whose query has our gain in it."""

    def module(self, dim: int) -> nn.Module:
        return self.imported.AttnResOperator(dim, eps=self.norm_eps)

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"pseudo_query": ours["attend.query"] * ours["attend.gain"]}

    def attend(self, module: nn.Module, sources: tuple[Tensor, ...]) -> Tensor:
        return module(torch.stack(sources))


class _Production(PeerAdapter):
    """A hyper-connection of transformers, which computes in float32 inside; the layer around it writes."""

    norm_eps, dtype = 1e-6, torch.float32
    name: ClassVar[str]

    def module(self, dim: int) -> nn.Module:
        config = SimpleNamespace(
            hidden_size=dim,
            rms_norm_eps=self.norm_eps,
            hc_mult=STREAMS,
            hc_eps=1e-6,
            hc_sinkhorn_iters=20,
            hc_magnitude=2.0,
        )
        module = getattr(self.imported, self.name)(config)
        std, scale = self.scheme.weight_std, self.scheme.scale_init  # type: ignore[attr-defined]
        nn.init.normal_(module.fn, std=std)  # the model initialises it, in `_init_weights`
        nn.init.constant_(module.scale, scale)
        nn.init.zeros_(module.base)
        return module

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"fn": ours["logits.project.weight"], "base": ours["logits.bias"], "scale": ours["logits.scale"]}


class DeepSeekV4(_Production):
    name = "DeepseekV4HyperConnection"
    scheme = DeepSeekHyperConnections(num_streams=STREAMS)

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        post, mixing, x = module(state)
        return mixing.to(state.dtype).mT @ state + post.to(state.dtype).unsqueeze(-1) * sublayer(x).unsqueeze(-2)


class HunYuanV4(_Production):
    name = "HYV4HyperConnection"
    scheme = IndependentHyperConnections(num_streams=STREAMS, weight_std=0.02)

    def module(self, dim: int) -> nn.Module:
        module = super().module(dim)
        biases = torch.tensor([*self.scheme.read_biases(self.index), *self.scheme.write_biases()])  # type: ignore
        module.base.data.copy_(biases)  # type: ignore
        return module

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        post, x = module(state)
        return (state.float() + post.float().unsqueeze(-1) * sublayer(x).float().unsqueeze(-2)).to(state.dtype)


class Peer(NamedTuple):
    """One implementation of another package.

    package: what pip installs; module: what Python imports; name: the class or function there; preset: our scheme of
    the same paper; cuda: whether it runs on CUDA devices only.
    differs: why the version that we read does not compute what the paper says, where it does not.
    """

    package: str
    module: str
    name: str
    preset: str
    adapter: Callable[[Any, str], PeerAdapter]
    cuda: bool = False
    differs: str = ""

    def imported(self, device: str) -> tuple[Any, str]:
        """Return its module and no words, or None and why it cannot take part on this device."""
        if self.cuda and device != "cuda":
            return None, "it needs a CUDA device"
        try:
            return importlib.import_module(self.module), ""
        except ModuleNotFoundError as error:
            return None, f"no module called {error.name} (pip install {self.package})"
        except Exception as error:  # of somebody else's package, such as kernels that this Triton refuses
            return None, f"importing it fails: {type(error).__name__}: {error}"


PEERS = (
    Peer("hyper-connections", "hyper_connections", "HyperConnections", "hc", LucidrainsHC),
    Peer(
        "hyper-connections",
        "hyper_connections",
        "mHC",
        "mhc",
        LucidrainsMHC,
        differs="every stream makes its own coefficients with weights that the streams share, where the paper maps the "
        "vector of all streams",
    ),
    Peer("liger-kernel", "liger_kernel.transformers.mhc", "LigerMHC", "mhc", LigerMHC, cuda=True),
    Peer(
        "mhc",
        "mhc",
        "MHCSkip",
        "mhc",
        HistorySkip,
        differs="it adds a constant mixture of the last states to the sublayer's output: no streams are read, mixed or "
        "written, and nothing depends on the token",
    ),
    Peer("flash-linear-attention", "fla.ops.attnres", "naive_attnres", "attnres", NaiveAttnRes),
    Peer("flash-linear-attention", "fla.ops.attnres", "fused_attnres", "attnres", FusedAttnRes, cuda=True),
    Peer("flash-attn-res", "flash_attn_res", "phase_1_batched_attention_triton_op", "attnres", FlashAttnRes, cuda=True),
    Peer("attn-res", "attn_res", "AttnResOperator", "attnres", AttnRes),
    Peer(
        "transformers",
        "transformers.models.deepseek_v4.modeling_deepseek_v4",
        "DeepseekV4HyperConnection",
        "mhc-deepseek",
        DeepSeekV4,
    ),
    Peer("transformers", "transformers.models.hy_v4.modeling_hy_v4", "HYV4HyperConnection", "ihc", HunYuanV4),
)
