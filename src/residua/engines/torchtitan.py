"""Train a torchtitan Llama with any residual scheme, on as many GPUs as torchtitan supports:

    torchrun --nproc-per-node 8 -m torchtitan.train --module residua.engines.torchtitan --config small \\
        --connection ddl-tc --dataloader.dataset-path data/fineweb-edu

Attention and feed-forward are torchtitan's modules, each between `read` and `write` of a connection. The parameters of
the stream belong to the root unit of FSDP2, in float32. Under tensor parallelism each rank computes the whole stream.
The configurations are the functions at the end of this file; torchtitan finds them by name.
"""

import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.func import functional_call

from residua.connections import resolve
from residua.connections.base import as_inputs
from residua.connections.parts.memory import whole_sequence
from residua.connections.parts.projection import LINEAR_MAPS
from residua.conversion.anatomy import Conversion, Sublayer
from residua.conversion.configuration import with_conversion
from residua.conversion.rebuild import expect_one_input
from residua.errors import InputError, extra, installing, require
from residua.lab.data import Batches, PreparedData
from residua.model_fields import ModelFields
from residua.models.linear import initialise, start_of

with extra("lab"):
    from transformers import LlamaConfig

TESTED = "0.3"
NEEDED = f"residua works with torchtitan {TESTED}: {installing('titan')}"
"""The end of an error for other versions; the extra `titan` has the same range of releases."""


def expect_tested(installed: str) -> None:
    """Raise InputError unless the `installed` version of torchtitan is a tested one."""
    if not re.match(rf"{re.escape(TESTED)}(?!\d)", installed):
        raise InputError(f"torchtitan {installed} is installed, and {NEEDED}")


@contextmanager
def tested() -> Iterator[None]:
    """Wrap an import of torchtitan: if it is missing, raise ModuleNotFoundError that names the tested releases."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torchtitan":
            raise
        raise ModuleNotFoundError(f"torchtitan is not installed, and {NEEDED}", name=error.name) from None


with tested():
    from torchtitan import __version__

    expect_tested(__version__)
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.config import TORCH_DTYPE_MAP, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division, get_fsdp_reshard_after_forward_policy
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
        weight = self.wq.weight
        if isinstance(weight, DTensor):  # with tensor parallelism torchtitan distributes only one input
            x = tuple(DTensor.from_local(part, weight.device_mesh, [Replicate()], run_check=False) for part in x)
        maps = (self.wq, self.wk, self.wv)
        return tuple(project(part).unflatten(-1, (-1, self.head_dim)) for project, part in zip(maps, x, strict=True))


class AddPenalty(torch.autograd.Function):
    """Return x unchanged; the backward pass adds the gradient of a penalty to the gradient of torchtitan's loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)


class Part(nn.ModuleList):
    """Modules of the stream that run together, such as the connections of a block. The stream owns them."""

    def forward(self, function: Callable, *inputs: Any) -> Any:
        """Return function(*inputs), which calls these modules; their DTensor parameters are used as plain tensors."""
        local = {name: x.to_local() for name, x in self.named_parameters() if isinstance(x, DTensor)}
        return functional_call(self, local, (function, *inputs)) if local else function(*inputs)


def as_local(x: Tensor) -> Tensor:
    """Return a replicated DTensor as a plain tensor; other tensors unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


class Block(TransformerBlock):
    """The two sublayers of a layer, and a reference to the part of the stream around them (not a submodule).

    share: the fraction of a step's tokens that are in one micro-batch of this rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TransformerBlock.Config):
        pass

    connections: Part
    share = 1.0

    def __init__(self, config: Config):
        super().__init__()
        self.attention = config.attention.build()
        self.feed_forward = config.feed_forward.build()

    def forward(self, state: Any, attention_masks: Any, positions: Tensor | None = None) -> Any:
        return self.connections(self.update, state, attention_masks, positions)

    def update(self, state: Any, attention_masks: Any, positions: Tensor | None) -> Any:
        """Return the state after both sublayers."""
        sublayers: tuple[Callable, ...] = (
            lambda *inputs: self.attention(inputs if inputs[1:] else inputs[0], attention_masks, positions),
            self.feed_forward,
        )
        for connection, sublayer in zip(self.connections, sublayers, strict=True):
            x, carry = connection.read(state, whole_sequence(connection))
            y = as_local(sublayer(*as_inputs(x)))
            if self.training and (penalty := connection.penalty(carry.coefficients)) is not None:
                y = AddPenalty.apply(y, penalty.mean() * self.share)
            state = connection.write(y, carry)
        return state


class ResidualLlama(Llama3Model):
    """torchtitan's Llama with a residual stream: blocks pass on the state in place of hidden states."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """connection, output_init: as in `ModelFields`; compute: the dtype of autocast, None for float32."""

        connection: Any = "ddl"
        output_init: Any = "sqrt_depth"
        compute: str | None = None

        def update_from_config(self, *, config: Any, **options: Any) -> None:
            Llama3Model.Config.update_from_config(self, config=config, **options)
            self.connection, self.output_init = config.connection, config.output_init
            narrow = config.training.mixed_precision_param
            self.compute = None if narrow == "float32" else narrow

    def __init__(self, config: Config):
        super().__init__(config)
        self.scheme = resolve(config.connection)
        require(self.scheme.causal, "connection", "a scheme that reads no later tokens", config.connection)
        norms = [nn.RMSNorm(config.dim, eps=config.norm.eps) for _ in range(2 * len(config.layers))]
        self.stream = self.scheme.build(config.dim, len(norms), norm_eps=config.norm.eps, norm=norms.__getitem__)
        for i, block in enumerate(self.layers.values()):
            vars(block)["connections"] = Part(self.stream.connections[2 * i : 2 * i + 2])
        fields = ModelFields(
            hidden_size=config.dim,
            num_hidden_layers=len(config.layers),
            num_attention_heads=config.layers[0].attention.n_heads,
            output_init=config.output_init,
        )
        self.matrices = {name: x for name, x in self.layers.named_modules() if isinstance(x, nn.Linear)}
        for name, matrix in self.matrices.items():
            writes = name.endswith(("wo", "w2"))
            matrix.init_std = start_of(fields, matrix.in_features, matrix.out_features, writes=writes)
        self.lm_head.init_std = fields.embedding_init_std

    def verify_module_protocol(self) -> None:
        """Do nothing: connections do not follow torchtitan's protocol; `init_states` initialises them."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        super().init_states(buffer_device=buffer_device)
        for module in (*self.matrices.values(), self.lm_head, *self.stream.modules()):
            initialise(module)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, attention_masks: Any = None) -> Tensor:
        embeddings = self.tok_embeddings(tokens)
        compute = None if self.config.compute is None else TORCH_DTYPE_MAP[self.config.compute]
        with torch.autocast(embeddings.device.type, compute, enabled=compute is not None):
            state = Part([self.stream.expand])(self.stream.expand, as_local(embeddings).float())
            for block in self.layers.values():
                state = block(state, attention_masks, positions)
            x = Part([self.stream.collapse])(self.stream.collapse, state)
        x = x.to(embeddings.dtype)
        if isinstance(embeddings, DTensor):
            x = DTensor.from_local(x, embeddings.device_mesh, embeddings.placements)
        x = self.norm(x)
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

    A block is a unit of FSDP2 in the narrow dtype. The stream belongs to the root unit, in float32, because gates and
    mappings need float32, and recomputing a write in the backward pass needs unsharded parameters.
    """
    if parallel_dims.tp_enabled:
        model.parallelize(parallel_dims)
        for module in model.stream.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                whole = distribute_tensor(parameter, parallel_dims.get_mesh("tp"), [Replicate()])
                module.register_parameter(name, nn.Parameter(whole))
    blocks = model.layers
    rows = training.local_batch_size * parallel_dims.dp_replicate * parallel_dims.dp_shard
    step = max(rows, training.global_batch_size)  # a negative global size means one micro-batch per rank
    for block in blocks.values():
        block.share = training.local_batch_size / step
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        # A block's code is compiled once for every structure of the state, which grows with depth in some schemes.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks))
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)

    mesh = parallel_dims.get_mesh(["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"])
    wide, narrow = (
        MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[dtype],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        )
        for dtype in ("float32", training.mixed_precision_param)
    )
    reshard = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, pp_enabled=False)
    ends = [model.tok_embeddings, model.norm, model.lm_head]  # the first and the last share their weight
    fully_shard(ends, mp_policy=narrow, reshard_after_forward=False, mesh=mesh)
    for block in blocks.values():
        fully_shard(block, mp_policy=narrow, reshard_after_forward=reshard, mesh=mesh)
    fully_shard(model, mp_policy=wide, mesh=mesh)
    disable_fsdp_gradient_division(model)
    # A block may return a view, which FSDP2 refuses because of in-place changes. Connections change nothing in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
    return model


class PreparedDataLoader(BaseDataLoader):
    """The batches of `residua train`: every window of a folder once per epoch, in an order given by the seed."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """dataset_path: a folder that `residua prepare` wrote; seed: determines the order of its windows."""

        seed: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ):
        path = config.dataset_path
        require(path is not None, "dataloader.dataset_path", "a folder that `residua prepare` wrote", path)
        data = PreparedData.open(path)
        self.rows = local_batch_size * dp_world_size
        self.batches = Batches(data.train, local_batch_size, seq_len, config.seed, dp_rank, dp_world_size)
        self.positions = torch.arange(seq_len).repeat(local_batch_size, 1)
        self.windows = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            inputs, labels = self.batches.at(self.windows // self.rows)
            self.windows += self.rows
            yield {"input": inputs, "positions": self.positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the number of windows that all ranks together have consumed.

        With it, training can resume on another number of ranks.
        """
        return {"windows": self.windows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.windows = state_dict["windows"]
        expected = f"a divisor of the {self.windows} windows that were trained on"
        require(self.windows % self.rows == 0, "the rows of a micro-batch over all ranks", expected, self.rows)


LAYER = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""The names of a layer's matrices: in torchtitan, and in a transformers Llama."""
ENDS = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
NORMS = ("input_layernorm", "post_attention_layernorm")


class ConvertedLlama(StateDictAdapter):
    """Maps parameters to those of a transformers Llama that `residua.convert` rebuilt with this scheme, and back."""

    def __init__(self, model_config: ResidualLlama.Config, hf_assets_path: str | None):
        super().__init__(model_config, hf_assets_path)
        self.names = names_in_transformers(model_config)
        self.tokenizer = hf_assets_path

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {self.names[name]: value for name, value in state_dict.items() if name in self.names}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        back = {theirs: ours for ours, theirs in self.names.items()}
        state_dict = {back[name]: value for name, value in hf_state_dict.items()}
        state_dict["lm_head.weight"] = state_dict["tok_embeddings.weight"]
        return state_dict

    def describe(self, folder: str | Path) -> None:
        """Write the configuration and the tokenizer, which are needed in addition to the weights to open the folder."""
        converted_configuration(self.model_config).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if self.tokenizer and (source := Path(self.tokenizer) / file).is_file():
                shutil.copy(source, folder)


def names_in_transformers(config: ResidualLlama.Config) -> dict[str, str]:
    """Map the name of every parameter here to its name in the converted Llama."""
    with torch.device("meta"):
        stream = ResidualLlama(config).stream
    depth = len(config.layers)
    names = dict(ENDS)
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
    """Return the configuration of the converted transformers Llama."""
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
        rms_norm_eps=config.norm.eps,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    conversion = Conversion(resolve(config.connection), "layers", anatomy)
    return with_conversion(plain, conversion.as_json())


def decay_matrices(optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: Any) -> None:
    """Decay only the weights of linear maps and embeddings, because gains, biases and taps need not be small."""
    modules = [module for part in model_parts for module in part.modules()]
    matrices = {id(module.weight) for module in modules if isinstance(module, (*LINEAR_MAPS, nn.Embedding))}
    for optimizer in optimizers:
        halves = []
        for group in optimizer.param_groups:
            for decayed in (True, False):
                chosen = [(id(x) in matrices) == decayed for x in group["params"]]
                half = {name: list(compress(group[name], chosen)) for name in ("params", "param_names")}
                if any(chosen):
                    halves.append(group | half | ({} if decayed else {"weight_decay": 0.0}))
        optimizer.param_groups = halves


class FolderCheckpoints(CheckpointManager):
    """torchtitan's checkpoints; with `last_save_in_hf` the last one becomes a complete transformers folder."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **options: Any) -> Any:
        saved = super().dcp_save(state_dict, checkpoint_id, *args, **options)
        if options.get("to_hf") and torch.distributed.get_rank() == 0:
            shutil.rmtree(Path(checkpoint_id) / "sharded")  # each rank's shards, whose content is in the whole file too
            self.sd_adapter.describe(checkpoint_id)
        return saved


class ResidualTrainer(Trainer):
    """torchtitan's trainer with the options `--connection` and `--output-init`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        connection: str = "ddl"
        """The residual scheme: a preset's name, with options after a colon: hc:num_streams=2"""
        output_init: Literal["sqrt_depth", "depth"] = "sqrt_depth"
        """How the matrices start, as `--model.output_init` of `residua train`"""

        def __post_init__(self) -> None:
            Trainer.Config.__post_init__(self)
            scheme, checkpoint = resolve(self.connection), self.checkpoint
            if checkpoint.enable and checkpoint.last_save_in_hf:  # writes a transformers folder
                model = self.model_spec.model
                with torch.device("meta"):
                    expect_one_input(scheme.build(model.dim, 2 * len(model.layers)))
            prepared = isinstance(self.dataloader, PreparedDataLoader.Config)  # other loaders pack documents into rows
            require(prepared, "dataloader", "a PreparedDataLoader", self.dataloader)
            parallelism = self.parallelism
            backend, sequence = parallelism.spmd_backend, parallelism.enable_sequence_parallel
            require(backend == "partial_dtensor", "parallelism.spmd_backend", "partial_dtensor", backend)
            # With compilation and tensor parallelism, torch 2.13 uses the gradient of a shard for the whole tensor.
            if parallelism.tensor_parallel_degree > 1:
                require(not self.compile.enable, "compile.enable", "false with tensor parallelism", True)
            require(
                not sequence,
                "parallelism.enable_sequence_parallel",
                "false, because each rank has the whole stream",
                sequence,
            )
            if self.hf_assets_path == ASSETS and self.dataloader.dataset_path:
                self.hf_assets_path = str(Path(self.dataloader.dataset_path) / "tokenizer")


ASSETS = Trainer.Config.__dataclass_fields__["hf_assets_path"].default


SIZES: dict[str, dict[str, Any]] = {
    "debug": {"dim": 64, "layers": 4, "heads": 4, "hidden_dim": 192, "vocab": 2048},
    "small": {"dim": 768, "layers": 12, "heads": 6, "hidden_dim": 2048, "vocab": 50304},
    "medium": {"dim": 1024, "layers": 24, "heads": 8, "hidden_dim": 2730, "vocab": 50304},
    "llama_1b": {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden_dim": 8192, "vocab": 128256},
}
"""Sizes by name: one for tests, the two of arXiv 2601.00417, and that of Llama 3.2 1B."""


def llama(
    *, dim: int, layers: int, heads: int, hidden_dim: int, vocab: int, kv_heads: int | None = None, attention: str
) -> ResidualLlama.Config:
    """Return the configuration of a model with tied embeddings, initialised as in `residua.models`."""
    later = {"weight": skip_param_init}
    norm = RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_})
    blocks = []
    for _ in range(layers):
        sublayer = make_gqa_config(
            dim=dim,
            n_heads=heads,
            n_kv_heads=kv_heads,
            wqkv_param_init=later,
            wo_param_init=later,
            inner_attention=get_attention_config(attention),
            rope=CosSinRoPE.Config(dim=dim // heads, max_seq_len=131072, theta=10000.0),
        )
        plain = sublayer.qkv_linear
        sublayer.qkv_linear = Projections.Config(head_dim=plain.head_dim, wq=plain.wq, wkv=plain.wkv)
        feed_forward = make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=later, w2w3_param_init=later)
        blocks.append(Block.Config(attention=sublayer, feed_forward=feed_forward, attention_norm=norm, ffn_norm=norm))
    return ResidualLlama.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=True,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=later),
        norm=norm,
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=later),
        layers=blocks,
    )


def model_registry(flavor: str, attn_backend: str = "flex") -> ModelSpec:
    """Return the specification with which torchtitan builds, shards and saves a model of this size."""
    return ModelSpec(
        name="residua",
        flavor=flavor,
        model=llama(**SIZES[flavor], attention=attn_backend),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=decay_matrices,
        state_dict_adapter=ConvertedLlama,
    )


def training(flavor: str, *, rows: int, length: int, lr: float, warmup: int, **step: int) -> ResidualTrainer.Config:
    """Return a training configuration with micro-batches of `rows` sequences of `length` tokens.

    step: further fields of torchtitan's `TrainingConfig`.
    """
    spec = model_registry(flavor)
    cross_entropy = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    adamw = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw)
    return ResidualTrainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=cross_entropy),
        dataloader=PreparedDataLoader.Config(),
        optimizer=OptimizersContainer.Config(param_groups=[group]),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=warmup, decay_type="cosine", min_lr_factor=0.05),
        training=TrainingConfig(local_batch_size=rows, seq_len=length, **step),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", enable_sequence_parallel=False),
        checkpoint=FolderCheckpoints.Config(last_save_model_only=False),
        debug=DebugConfig(seed=0),
    )


def debug() -> ResidualTrainer.Config:
    """Ten steps of a tiny model, for tests on any machine."""
    return training("debug", rows=2, length=64, lr=1e-3, warmup=2, steps=10)


def small() -> ResidualTrainer.Config:
    """The paper's small model and its training, arXiv 2601.00417 section 5.1."""
    return training("small", rows=20, length=1024, lr=1e-3, warmup=2000, global_batch_size=480, steps=100_000)


def medium() -> ResidualTrainer.Config:
    """The paper's medium model and its training."""
    return training("medium", rows=10, length=1024, lr=1e-3, warmup=2000, global_batch_size=480, steps=100_000)


def llama_1b() -> ResidualTrainer.Config:
    """A model with the sizes of Llama 3.2 1B."""
    return training("llama_1b", rows=4, length=4096, lr=3e-4, warmup=2000, global_batch_size=512, steps=100_000)
