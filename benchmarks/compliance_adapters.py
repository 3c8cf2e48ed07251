"""How the compliance table calls the implementations that it checks beside the peers of `benchmarks.adapters`."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.adapters import STREAMS, HistorySkip, HunYuanV4, LucidrainsMHC, NaiveAttnRes, PeerAdapter, _Production
from residua.connections import (
    AlternatingUpdates,
    GatedResidual,
    InklingAttentionResiduals,
    ManifoldHyperConnections,
    resolve,
)
from residua.ops import sinkhorn
from residua.testing import StreamAdapter, agree, normal


class Glm5Next(_Production):
    name = "Glm5NextTextHyperConnection"
    scheme = resolve("mhc-glm")

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        post, mixing, x = module(state)
        return mixing.to(state.dtype).mT @ state + post.to(state.dtype).unsqueeze(-1) * sublayer(x).unsqueeze(-2)


class Qwen4Exp(PeerAdapter):
    """The gated residual of transformers, whose norm is part of the read."""

    scheme = GatedResidual(num_streams=STREAMS, gate_rank=8)
    owns_norm, norm_eps, dtype = True, 1e-6, torch.float32

    def module(self, dim: int) -> nn.Module:
        config = SimpleNamespace(hc_count=STREAMS, hidden_size=dim, hc_lowrank=8, rms_norm_eps=self.norm_eps)
        module = self.imported.Qwen4ExpTextGatedResidual(config)
        for linear in (module.input_mix_weight_down, module.input_mix_weight_up, module.block_inject_weight):
            nn.init.normal_(linear.weight, std=0.02)  # the model initialises them, with its `initializer_range`
        return module

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            "hc_norm.weight": ours["gated.weight"].flatten(),
            "input_mix_weight_down.weight": ours["gated.down.weight"],
            "input_mix_weight_up.weight": ours["gated.up.weight"],
            "block_inject_weight.weight": ours["inject.weight"],
        }

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        x, kept, inject = module(state.flatten(-2))
        return kept.unflatten(-1, (STREAMS, -1)) + inject.unsqueeze(-1) * sublayer(x).unsqueeze(-2)


class Inkling2(PeerAdapter):
    """The depth attention of transformers, with one query; its model sums outputs into blocks, here of one sublayer."""

    scheme = InklingAttentionResiduals(block_size=1, separate_every=0)
    norm_eps, dtype = 1e-6, torch.float32
    name = "Inkling2BlockAttentionResidual"

    def module(self, dim: int) -> nn.Module:
        return getattr(self.imported, self.name)(SimpleNamespace(hidden_size=dim, _attn_implementation="eager"))

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"query": ours["attend.query"][0]}

    def step(self, module: nn.Module, state: tuple[Tensor, ...], sublayer: Callable[..., Tensor]) -> Any:
        (x,) = module(torch.stack(state[:-1], -2), state[-1])
        return (*state, sublayer(x.to(state[0].dtype)))


class Inkling2Loop(Inkling2):
    name = "Inkling2LoopBlockAttentionResidual"


class Gemma3nAltUp(StreamAdapter):
    """AltUp of transformers: a module for each block of two sublayers, whose other parts are the model's own."""

    scheme = AlternatingUpdates(num_streams=STREAMS, laurel_rank=0, expand="repeat")
    owns_norm, norm_eps, dtype = False, 1e-6, torch.float32

    def __init__(self, imported: Any, device: str):
        self.imported, self.device = imported, device

    def build(self, dim: int, num_sublayers: int) -> nn.Module:
        config = SimpleNamespace(
            hidden_size=dim,
            altup_num_inputs=STREAMS,
            altup_active_idx=0,
            altup_coef_clip=None,
            rms_norm_eps=self.norm_eps,
        )
        blocks = nn.ModuleList(self.imported.Gemma3nTextAltUp(config) for _ in range(num_sublayers // 2))
        for name, weight in blocks.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)  # the model initialises them, with its `initializer_range`
            elif name.endswith("correct_output_scale"):
                weight.requires_grad_(False)  # the model scales a side output with it
        return blocks

    def parameters(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        values = {}
        for i in range(self.num_sublayers // 2):
            predict, correct = f"connections.{2 * i}.", f"connections.{2 * i + 1}."
            values |= {
                f"{i}.router_norm.weight": ours[predict + "router.norm.weight"],
                f"{i}.modality_router.weight": ours[predict + "router.project.weight"],
                f"{i}.prediction_coefs.weight": ours[predict + "predict.weight"],
                f"{i}.correction_coefs.weight": ours[correct + "correct.weight"],
                f"{i}.correct_output_scale": torch.zeros(self.dim),
            }
        return values

    def forward(self, module: nn.Module, x: Tensor, sublayers: list[Callable[..., Tensor]]) -> Tensor:
        state = torch.stack([x] * STREAMS)
        for block, attention, mlp in zip(module, sublayers[::2], sublayers[1::2]):
            predicted = block.predict(state)
            active = predicted[0] + attention(predicted[0])
            state = block.correct(predicted, active + mlp(active))
        return state.mean(0)


class LigerAttnRes(NaiveAttnRes):
    """`liger_kernel.transformers.functional.liger_attn_res`, with the tensors that it asks for."""

    def attend(self, module: nn.Module, sources: tuple[Tensor, ...]) -> Tensor:
        stacked = torch.stack(sources)
        return self.imported.liger_attn_res(stacked, module.query, module.gain, self.norm_eps).to(stacked.dtype)


class FastAttnRes(NaiveAttnRes):
    """`attnres.attnres` of fast-attnres, which refuses a CPU in its own words."""

    dtype = torch.bfloat16

    def attend(self, module: nn.Module, sources: tuple[Tensor, ...]) -> Tensor:
        return self.imported.attnres(sources, module.query * module.gain, eps=self.norm_eps)


class HunYuanV4VL(HunYuanV4):
    name = "HYV4VLHyperConnection"


class Megatron(PeerAdapter):
    """`HyperConnectionModule` of Megatron-LM, with streams as (seq, batch, n * dim) and no norm before the sublayer.

    Its markers for NVIDIA's profiler are taken out, which builds of torch for the CPU lack.
    """

    scheme = ManifoldHyperConnections(num_streams=STREAMS)
    norm_eps, dtype = 0.0, torch.float32  # it divides by a root mean square plus 1e-6

    def module(self, dim: int) -> nn.Module:
        torch.cuda.nvtx.range = lambda *_: nullcontext()  # type: ignore[assignment]
        config = SimpleNamespace(
            hidden_size=dim,
            mhc_num_residual_streams=STREAMS,
            mhc_sinkhorn_iterations=20,
            mhc_init_gating_factor=0.01,
            perform_initialization=True,
            sequence_parallel=False,
        )
        return self.imported.HyperConnectionModule(config, layer_number=1)

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        pre, post, res = ours["mappings.alpha"].split(1)
        return {
            "mapping_proj.weight": ours["mappings.phi.weight"],
            "alpha_pre": pre,
            "alpha_post": post,
            "alpha_res": res,
            "bias": ours["mappings.bias"],
        }

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        x = state.flatten(-2).transpose(0, 1).contiguous()
        h_pre, h_post, h_res = module.compute_mappings(x)
        y = sublayer(module.aggregate(x, h_pre).transpose(0, 1)).transpose(0, 1)
        mixed = module.apply_h_res(h_res, x) + module.apply_h_post((y, None), h_post)[0]
        return mixed.transpose(0, 1).unflatten(-1, (STREAMS, -1))


class Tokenbender(PeerAdapter):
    """`hyper_connections_mhc.HyperConnections` of tokenbender: its logits are constants, and it has no scales."""

    scheme = ManifoldHyperConnections(num_streams=STREAMS)
    temperature: ClassVar[float] = 1.0

    def module(self, dim: int) -> nn.Module:
        return self.imported.HyperConnections(
            STREAMS, dim=dim, layer_index=self.index, mhc_num_iters=20, mhc_tau=self.temperature
        )

    def values(self, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        pre, post, res = ours["mappings.bias"].split([STREAMS, STREAMS, STREAMS**2])
        return {
            "H_pre_logits": pre.unsqueeze(0),
            "H_post_logits": post.unsqueeze(0),
            "H_res_logits": res.view(STREAMS, STREAMS),
        }

    def step(self, module: nn.Module, state: Tensor, sublayer: Callable[..., Tensor]) -> Tensor:
        x, write = module(state.movedim(-2, 1).flatten(0, 1))
        return write(sublayer(x)).unflatten(0, (state.shape[0], STREAMS)).movedim(1, -2)

    def statements(self) -> dict[str, bool]:
        """Return what we say of it, and whether that is so with random logits."""
        module = self.module(self.dim).double()
        with torch.no_grad():
            for i, logits in enumerate(module.parameters()):
                logits.copy_(normal(logits.numel(), seed=i).view_as(logits))
        states = [normal(2, 3, STREAMS, self.dim, seed=seed) for seed in (7, 8)]
        read: list[Tensor] = []

        def kept(state: Tensor) -> Tensor:
            return self.step(module, state, lambda x: read.append(x) or torch.zeros_like(x))  # type: ignore[func-returns-value]

        with torch.no_grad():
            mixed = [kept(state) for state in (*states, sum(states))]
            h_res = sinkhorn(module.H_res_logits, 20)
            write = self.step(module, states[0], torch.ones_like) - mixed[0]
        defaults = inspect.signature(self.imported.HyperConnections).parameters
        h_pre, h_post = module.H_pre_logits.softmax(-1), module.H_post_logits.softmax(-1)
        return {
            "all three mappings are constants: no token has an influence on them": (
                agree(mixed[0] + mixed[1], mixed[2]) and agree(read[0] + read[1], read[2])
            ),
            "H_pre is a softmax over the streams, in the paper a sigmoid": agree(
                read[0], (h_pre @ states[0])[..., 0, :]
            ),
            "H_post is a softmax over the streams, in the paper twice a sigmoid": (
                agree(write, h_post.mT.expand(STREAMS, self.dim).expand_as(write))
            ),
            "it mixes with the transpose of H_res, which for free constants is a convention": (
                agree(mixed[0], h_res.mT @ states[0])
            ),
            "compared with 20 steps of Sinkhorn at a temperature of 1, where its defaults are 10 steps at 0.05": (
                (defaults["mhc_num_iters"].default, defaults["mhc_tau"].default) == (10, 0.05)
            ),
        }


class HistoryWithStatements(HistorySkip):
    """`mhc.MHCSkip` with what we say of it."""

    def statements(self) -> dict[str, bool]:
        """Return what we say of it, and whether that is so with random logits."""
        module = self.module(self.dim).double()
        with torch.no_grad():
            module.mixing_logits.copy_(normal(STREAMS))
            y, *history = (normal(2, 3, self.dim, seed=seed) for seed in range(1 + STREAMS))
            expected = y + torch.einsum("n,nbsd->bsd", module.mixing_logits.softmax(-1), torch.stack(history))
            return {
                "it adds one mixture of the last states, the same for all tokens, to the output of the sublayer, where "
                "the paper reads, mixes and writes streams": agree(module(y, history), expected),
            }


class PerStreamMHC(LucidrainsMHC):
    """`hyper_connections.mHC` with what we say of it."""

    def statements(self) -> dict[str, bool]:
        """Return what we say of it, and whether that is so with random weights."""
        module = self.module(self.dim).double()
        with torch.no_grad():
            for i, weight in enumerate(module.parameters()):
                weight.copy_(normal(weight.numel(), seed=i).view_as(weight))
        state = normal(1, 1, STREAMS, self.dim)
        read: list[Tensor] = []

        def step(x: Tensor) -> Tensor:
            read.append(x)
            return torch.zeros_like(x)

        def reads(stream: int) -> Tensor:
            """Return how the read changes with another stream 0, given stream 1 as it is or zero."""
            read.clear()
            for other in (0.0, 1.0):
                for factor in (1.0, 2.0):
                    changed = state.clone()
                    changed[..., 0, :] *= factor
                    changed[..., stream, :] *= other
                    self.step(module, changed, step)
            return (read[1] - read[0]) - (read[3] - read[2])

        with torch.no_grad():
            apart = all(agree(reads(i), torch.zeros_like(read[0]), dtype=torch.float32) for i in range(1, STREAMS))
        return {
            "the read coefficient of a stream depends on that stream only, in the paper on the vector of all streams": (
                apart
            ),
        }
