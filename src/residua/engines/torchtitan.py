"""Train a Llama of torchtitan with any residual scheme, on as many GPUs as torchtitan takes:

    torchrun --nproc-per-node 8 -m torchtitan.train --module residua.engines.torchtitan --config small \\
        --connection ddl-tc --dataloader.dataset-path data/fineweb-edu

Attention and feed-forward are torchtitan's, bare; `read` and `write` of a connection stand around each. The stream is
every rank's own: its parameters belong to the root unit of FSDP2, in float32, and under tensor parallelism each rank
computes all of it. The configurations are the functions at the end of this file; torchtitan finds them by name.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from residua.connections import resolve
from residua.connections.base import as_inputs
from residua.connections.memory import memory_of
from residua.errors import InputError, extra, require
from residua.models.linear import initialise
from residua.models.sizes import SIZES

with extra("titan"):
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division, get_fsdp_reshard_after_forward_policy
    from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm, TransformerBlock
    from torchtitan.models.common.attention import QKVLinear
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.llama3.model import Llama3Model
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.protocols.state_dict_adapter import StateDictAdapter
    from torchtitan.trainer import Trainer


class Projections(QKVLinear):
    """Queries, keys and values from one input, or from three for a scheme that reads three."""

    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        pass

    def forward(self, x: Tensor | tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        if isinstance(x, Tensor):
            return super().forward(x)
        maps = (self.wq, self.wk, self.wv)
        return tuple(project(part).unflatten(-1, (-1, self.head_dim)) for project, part in zip(maps, x, strict=True))


class AddPenalty(torch.autograd.Function):
    """x as it is, and the gradient of a penalty beside that of the loss, which torchtitan computes from the logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)


class Block(TransformerBlock):
    """The two sublayers of a layer. `connections` are the stream's, which the model owns."""

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        pass

    connections: tuple[Any, ...] = ()
    packed = False
    share = 1.0

    def __init__(self, config: Config):
        super().__init__()
        self.attention = config.attention.build()
        self.feed_forward = config.feed_forward.build()

    def forward(self, state: Any, attention_masks: Any, positions: Tensor | None = None) -> Any:
        documents = documents_at(positions) if self.packed else None
        sublayers: tuple[Callable, ...] = (
            lambda *inputs: self.attention(inputs if inputs[1:] else inputs[0], attention_masks, positions),
            self.feed_forward,
        )
        for connection, sublayer in zip(self.connections, sublayers, strict=True):
            x, carry = connection.read(state, memory_of(connection, None, None, documents))
            y = sublayer(*as_inputs(x))
            if self.training and (penalty := connection.penalty(carry.coefficients)) is not None:
                y = AddPenalty.apply(y, penalty.mean() * self.share)
            state = connection.write(y, carry)
        return state


def documents_at(positions: Tensor) -> Tensor:
    """Return the number of each token's document, from positions: (batch, seq), which begin with 0 in each."""
    return (positions == 0).cumsum(1)


class ResidualLlama(Llama3Model):
    """torchtitan's Llama over a stream: the state goes from block to block in place of the hidden states."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """connection: a preset's name or a mapping, as everywhere in residua. The rest is the trainer's to set.

        packed: rows hold several documents; compute: the dtype of autocast; None for float32.
        """

        connection: Any = "ddl"
        packed: bool = False
        compute: str | None = None

        def update_from_config(self, *, config: Any, **options: Any) -> None:
            Llama3Model.Config.update_from_config(self, config=config, **options)
            self.connection = config.connection
            self.packed = not isinstance(config.dataloader, PreparedDataLoader.Config)
            narrow = config.training.mixed_precision_param
            self.compute = None if narrow == "float32" else narrow

        @property
        def norm_eps(self) -> float:
            return self.norm.eps

    def __init__(self, config: Config):
        super().__init__(config)
        self.scheme = resolve(config.connection)
        require(self.scheme.causal, "connection", "a scheme that reads no later tokens", config.connection)
        norms = [nn.RMSNorm(config.dim, eps=config.norm_eps) for _ in range(2 * len(config.layers))]
        self.stream = self.scheme.build(config.dim, len(norms), norm_eps=config.norm_eps, norm=norms.__getitem__)
        for i, block in enumerate(self.layers.values()):
            block.connections = tuple(self.stream.connections[2 * i : 2 * i + 2])
            block.packed = config.packed

    def verify_module_protocol(self) -> None:
        """Do nothing: connections are plain modules, which `init_states` starts."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        super().init_states(buffer_device=buffer_device)
        for module in self.stream.modules():
            initialise(module)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Any = None) -> Tensor:
        embeddings = self.tok_embeddings(tokens)
        documents = documents_at(positions) if self.config.packed else None
        compute = None if self.config.compute is None else TORCH_DTYPE_MAP[self.config.compute]
        with torch.autocast(embeddings.device.type, compute, enabled=compute is not None):
            expand, collapse = self.stream.expand, self.stream.collapse
            state = expand(embeddings.float(), memory_of(expand, None, None, documents))
            for block in self.layers.values():
                state = block(state, attention_masks, positions)
            x = collapse(state, memory_of(collapse, None, None, documents))
        x = self.norm(x.to(embeddings.dtype))
        return x if self._skip_lm_head else self.lm_head(x)


def parallelize(
    model: ResidualLlama,
    *,
    parallel_dims: Any,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> ResidualLlama:
    """Apply tensor parallelism to the sublayers, activation checkpointing, torch.compile and FSDP2 to the model.

    A block is a unit of FSDP2 in the narrow dtype. The stream belongs to the root unit, in float32: gates and mappings
    need it, and a connection that is replayed finds its parameters whole.
    """
    typed = parallelism.spmd_backend != "partial_dtensor"
    if typed or parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)
    blocks = model.layers
    accumulation = max(1, training.global_batch_size // (training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard))
    for block in blocks.values():
        block.share = 1 / (accumulation * parallel_dims.dp_replicate * parallel_dims.dp_shard)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)

    if typed:
        mesh, axes = resolve_fsdp_mesh(parallel_dims)
    else:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        mesh, axes = parallel_dims.get_mesh(names), None
    options: dict[str, Any] = {"mesh": mesh} if axes is None else {"mesh": mesh, "dp_mesh_dims": axes}
    wide, narrow = (
        MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[dtype],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        )
        for dtype in ("float32", training.mixed_precision_param)
    )
    reshard = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, pp_enabled=False)
    ends: list[nn.Module] = [model.norm, model.lm_head]
    if model.enable_weight_tying:
        ends.insert(0, model.tok_embeddings)
    else:
        fully_shard(model.tok_embeddings, mp_policy=narrow, reshard_after_forward=reshard, **options)
    fully_shard(ends, mp_policy=narrow, reshard_after_forward=False, **options)
    for block in blocks.values():
        fully_shard(block, mp_policy=narrow, reshard_after_forward=reshard, **options)
    fully_shard(model, mp_policy=wide, **options)
    disable_fsdp_gradient_division(model)
    return model


class PreparedDataLoader(BaseDataLoader):
    """The batches of `residua train`: every window of a prepared folder once per epoch, by (seed, step) alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """dataset_path: a folder that `residua prepare` wrote; seed: decides the order of its windows."""

        seed: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ):
        from residua.lab.data import Batches, PreparedData

        self.data = open_data(config)
        self.rows = local_batch_size * dp_world_size
        self.batches = Batches(self.data.train, local_batch_size, seq_len, config.seed, dp_rank, dp_world_size)
        self.positions = torch.arange(seq_len).repeat(local_batch_size, 1)
        self.windows = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            inputs, labels = self.batches.at(self.windows // self.rows)
            self.windows += self.rows
            yield {"input": inputs, "positions": self.positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return how many windows all ranks have taken, which does not depend on their number."""
        return {"windows": self.windows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.windows = state_dict["windows"]


LAYER = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""The matrices of a layer here, and in the Llama of transformers."""
ENDS = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
NORMS = ("input_layernorm", "post_attention_layernorm")


class ConvertedLlama(StateDictAdapter):
    """Names of parameters here and in a Llama of transformers that `residua.convert` rebuilt over the same scheme."""

    def __init__(self, model_config: ResidualLlama.Config, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        self.names = names_in_transformers(model_config)
        self.tokenizer = hf_assets_path

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {self.names[name]: value for name, value in state_dict.items() if name in self.names}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        back = {theirs: ours for ours, theirs in self.names.items()}
        state_dict = {back[name]: value for name, value in hf_state_dict.items()}
        if self.model_config.enable_weight_tying:
            state_dict["lm_head.weight"] = state_dict["tok_embeddings.weight"]
        return state_dict

    def describe(self, folder: str | Path) -> None:
        """Write the configuration beside the weights, and the tokenizer: then `AutoModelForCausalLM` opens the folder."""
        converted_configuration(self.model_config).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if self.tokenizer and (source := Path(self.tokenizer) / file).is_file():
                shutil.copy(source, folder)


def names_in_transformers(config: ResidualLlama.Config) -> dict[str, str]:
    """Return the name of every parameter in the converted Llama, by its name here."""
    with torch.device("meta"):
        stream = ResidualLlama(config).stream
    depth = len(config.layers)
    names = dict(ENDS) if config.enable_weight_tying else ENDS | {"lm_head.weight": "lm_head.weight"}
    for i in range(depth):
        names |= {f"layers.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight" for ours, theirs in LAYER.items()}
    for name, _ in stream.named_parameters():
        part, _, rest = name.partition(".")
        if part == "connections":
            index, _, rest = rest.partition(".")
            layer, place = divmod(int(index), 2)
            borrowed = rest == "norm.weight"
            theirs = f"{NORMS[place]}.weight" if borrowed else f"stream.connections.{place}.{rest}"
        else:
            layer, theirs = (0 if part == "expand" else depth - 1), f"stream.{name}"
        names[f"stream.{name}"] = f"model.layers.{layer}.{theirs}"
    return names


def converted_configuration(config: ResidualLlama.Config) -> Any:
    """Return the configuration of the converted Llama of transformers."""
    from transformers import LlamaConfig

    from residua.conversion.anatomy import Conversion, Sublayer
    from residua.conversion.configuration import with_conversion

    attention, feed_forward = config.layers[0].attention, config.layers[0].feed_forward
    anatomy = (tuple(Sublayer((norm,), normed=True) for norm in NORMS),) * len(config.layers)
    plain = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=feed_forward.w1.out_features,
        num_hidden_layers=len(config.layers),
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads or attention.n_heads,
        head_dim=attention.rope.dim,
        max_position_embeddings=attention.rope.max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rope.theta},
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.enable_weight_tying,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    conversion = Conversion(resolve(config.connection), "layers", anatomy)
    return with_conversion(plain, conversion.as_json())


class DecayMatrices(OptimizersContainer):
    """torchtitan's optimizers; weights of linear maps and embeddings are decayed, gains, biases and taps are not."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _build_param_groups(model: nn.Module, configs: list[ParamGroupConfig], options: dict[str, Any]) -> Any:
        groups, patterns = OptimizersContainer._build_param_groups(model, configs, options)
        matrices = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))}
        for name, whole in groups.items():
            halves = []
            for group, pattern in zip(whole, patterns.pop(name), strict=True):
                pairs = list(zip(group["params"], group["param_names"], strict=True))
                for kept in (True, False):
                    if half := [pair for pair in pairs if (id(pair[0]) in matrices) == kept]:
                        parameters, names = map(list, zip(*half))
                        changed = {"params": parameters, "param_names": names} | ({} if kept else {"weight_decay": 0.0})
                        halves.append(group | changed)
                        patterns.setdefault(name, []).append(pattern)
            groups[name] = halves
        return groups, patterns


class FolderCheckpoints(CheckpointManager):
    """torchtitan's checkpoints; its last one for transformers (`last_save_in_hf`) has a configuration beside it."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **options: Any) -> Any:
        saved = super().dcp_save(state_dict, checkpoint_id, *args, **options)
        if options.get("to_hf") and torch.distributed.get_rank() == 0:
            self.sd_adapter.describe(checkpoint_id)
        return saved


class ResidualTrainer(Trainer):
    """torchtitan's trainer with the option `--connection`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        connection: str = "ddl"
        """The residual scheme: a preset's name, with options after a colon: hc:num_streams=2"""

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)
            resolve(self.connection)
            parallelism = self.parallelism
            if parallelism.tensor_parallel_degree > 1 and parallelism.enable_sequence_parallel:
                raise InputError("parallelism.enable_sequence_parallel must be false: every rank has the whole stream")
            if self.hf_assets_path == ASSETS and self.dataloader.dataset_path:
                self.hf_assets_path = str(Path(self.dataloader.dataset_path) / "tokenizer")


ASSETS = Trainer.Config.__dataclass_fields__["hf_assets_path"].default


def open_data(config: PreparedDataLoader.Config) -> Any:
    """Return the prepared data. Raises InputError without a path."""
    from residua.lab.data import PreparedData

    require(config.dataset_path is not None, "dataloader.dataset_path", "a folder that `residua prepare` wrote", None)
    return PreparedData.open(config.dataset_path)


def llama(
    *, dim: int, layers: int, heads: int, head_dim: int, hidden_dim: int, vocab: int, key_value_heads: int | None = None,
    theta: float = 10000.0, attention: str = "flex", tied: bool = True,
) -> ResidualLlama.Config:  # fmt: skip
    """Return the configuration of a model. Its matrices start as in `residua.models`, not as in torchtitan."""
    std = 0.5 / math.sqrt(dim)
    normal = {"weight": partial(nn.init.normal_, std=std)}
    output = {"weight": partial(nn.init.normal_, std=std / math.sqrt(layers))}
    embedding = {"weight": partial(nn.init.normal_, std=0.02)}
    norm = RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_})
    blocks = []
    for _ in range(layers):
        sublayer = make_gqa_config(
            dim=dim,
            n_heads=heads,
            n_kv_heads=key_value_heads,
            head_dim=head_dim,
            wqkv_param_init=normal,
            wo_param_init=output,
            inner_attention=get_attention_config(attention),
            rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=131072, theta=theta),
        )
        plain = sublayer.qkv_linear
        sublayer.qkv_linear = Projections.Config(head_dim=plain.head_dim, wq=plain.wq, wkv=plain.wkv)
        feed_forward = make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=normal, w2w3_param_init=normal)
        feed_forward.w2.param_init = output
        blocks.append(
            Block.Config(attention=sublayer, feed_forward=feed_forward, attention_norm=norm, ffn_norm=norm)
        )
    return ResidualLlama.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init={"weight": skip_param_init} if tied else embedding
        ),
        norm=norm,
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=embedding),
        layers=blocks,
    )


FLAVOURS: dict[str, dict[str, Any]] = {
    "debug": dict(dim=64, layers=4, heads=4, head_dim=16, hidden_dim=192, vocab=2048),
    "small": dict(dim=768, layers=12, heads=6, head_dim=128, hidden_dim=2048, vocab=50304),
    "medium": dict(dim=1024, layers=24, heads=8, head_dim=128, hidden_dim=2730, vocab=50304),
    "llama_1b": dict(
        dim=2048, layers=16, heads=32, head_dim=64, hidden_dim=8192, vocab=128256, key_value_heads=8, theta=500000.0
    ),
}
"""Sizes by name: one for trying, the two of arXiv 2601.00417, and Llama 3.2 1B's."""


def model_registry(flavor: str, attn_backend: str = "flex") -> ModelSpec:
    """Return what torchtitan needs to build, shard and save a model of this size."""
    return ModelSpec(
        name="residua",
        flavor=flavor,
        model=llama(**FLAVOURS[flavor], attention=attn_backend),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=ConvertedLlama,
    )


def _configuration(flavor: str, *, batch_size: int, sequence_length: int, steps: int, lr: float, warmup: int, rows: int) -> ResidualTrainer.Config:
    spec = model_registry(flavor)
    cross_entropy = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    adamw = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8}
    return ResidualTrainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=cross_entropy),
        dataloader=PreparedDataLoader.Config(),
        optimizer=DecayMatrices.Config(
            param_groups=[
                ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw | {"weight_decay": 0.1})
            ]
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=warmup, decay_type="cosine", min_lr_factor=0.05),
        training=TrainingConfig(
            local_batch_size=batch_size, global_batch_size=rows, seq_len=sequence_length, steps=steps
        ),
        parallelism=ParallelismConfig(enable_sequence_parallel=False),
        metrics=MetricsProcessor.Config(log_freq=10),
        checkpoint=FolderCheckpoints.Config(last_save_model_only=False),
    )


def debug() -> ResidualTrainer.Config:
    """Four layers of width 64, ten steps."""
    return _configuration("debug", batch_size=2, sequence_length=64, steps=10, lr=1e-3, warmup=2, rows=-1)


def small() -> ResidualTrainer.Config:
    """The sizes and the training of the paper's small model, arXiv 2601.00417 section 5.1."""
    return _configuration("small", batch_size=20, sequence_length=1024, steps=100_000, lr=1e-3, warmup=2000, rows=480)


def medium() -> ResidualTrainer.Config:
    """The sizes and the training of the paper's medium model."""
    return _configuration("medium", batch_size=20, sequence_length=1024, steps=100_000, lr=1e-3, warmup=2000, rows=480)


def llama_1b() -> ResidualTrainer.Config:
    """The sizes of Llama 3.2 1B."""
    return _configuration("llama_1b", batch_size=4, sequence_length=4096, steps=100_000, lr=3e-4, warmup=2000, rows=512)
