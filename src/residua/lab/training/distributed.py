"""Train one model in several processes: join the ranks, synchronise errors and flags, and wrap a model in DDP.

torchrun starts the processes, called ranks, and `join` connects them. A single process is the first rank, and its
collective calls return at once.
"""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from residua.errors import InputError, ReportedElsewhere, RunError

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig

# Long enough for the first rank to prepare data while the others wait.
TIMEOUT = timedelta(hours=2)
# Environment variables that torchrun sets in every process it starts.
TORCHRUN_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Ranks:
    """One rank's view of all ranks of a job. control: their Gloo group; None if torchrun did not start this process."""

    rank: int = 0
    world_size: int = 1
    restarts: int = 0
    control: Any = None

    @property
    def first(self) -> bool:
        """Whether this rank writes files and messages for all."""
        return self.rank == 0

    @property
    def joined(self) -> bool:
        return self.control is not None

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of x, a tensor on the device, over the ranks."""
        if not self.joined:
            return x
        total = x.clone()
        dist.all_reduce(total)
        return total / self.world_size

    def any(self, flag: bool) -> bool:
        """Return whether any rank sets the flag. Ranks wait for each other, but not for their devices."""
        if not self.joined:
            return flag
        flags = torch.tensor([flag], dtype=torch.uint8)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.control)
        return bool(flags.item())

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order."""
        if not self.joined:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    @contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raise on all ranks if the `with` block raises on one. Only the first such rank reports its error.

        The block must not contain collective operations. Interrupts are not passed on, because every rank gets them.
        """
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        statuses = self.gather(error and _status(error))
        first = next((rank for rank, status in enumerate(statuses) if status is not None), None)
        if first is not None and first != self.rank:
            raise ReportedElsewhere(statuses[first]) from error
        if error is not None:
            raise error


ALONE = Ranks()


def is_first() -> bool:
    """Return whether this process is the only one, or the first one of torchrun."""
    return not os.environ.keys() >= TORCHRUN_VARIABLES or os.environ["RANK"] == "0"


@contextmanager
def join(device: str = "auto") -> Iterator[Ranks]:
    """Join the other processes of torchrun; yield `ALONE` without torchrun.

    Args:
        device: as `train.device`. With CUDA, each process of a machine takes the GPU of its local rank.

    Raises:
        InputError: there are more processes than GPUs.
        RunError: the ranks cannot reach each other, or another rank ended while this one waited for it.
    """
    if not os.environ.keys() >= TORCHRUN_VARIABLES:
        yield ALONE
        return
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"torchrun must start at most one process for each of the {torch.cuda.device_count()} GPUs of a "
                f"machine, got local rank {local_rank}; lower --nproc-per-node"
            )
        torch.cuda.set_device(local_rank)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    try:
        store, rank, world_size = next(dist.rendezvous("env://"))
        # torchrun may keep its store for the next attempt, with addresses of processes that no longer exist.
        store = dist.PrefixStore(f"attempt {restarts}", store)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size)
        control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError, OSError) as error:  # sockets, host names or settings
        raise RunError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: cannot reach the other ranks at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {str(error).splitlines()[0]}; all machines must "
            "reach that address, and GLOO_SOCKET_IFNAME names the network interface if there are several"
        ) from error
    ranks = Ranks(rank, world_size, restarts, control)
    try:
        yield ranks
        dist.barrier(group=control)
    except RuntimeError as error:
        if isinstance(error, (RunError, torch.OutOfMemoryError)) or not connection_lost(error):
            raise
        # Gloo's own message only has addresses, but the cause is in another process.
        raise RunError(
            f"rank {ranks.rank} of {ranks.world_size}: another rank ended, so this one cannot continue; see the "
            "messages of the rank that ended first or of torchrun; --resume continues from the newest checkpoint"
        ) from error
    dist.destroy_process_group()  # not after an error, when it would wait for missing ranks


@dataclass(frozen=True)
class BatchShard:
    """The part of a step that one rank computes. For any number of ranks, the parts together make the same step.

    A step has `accumulation` micro-batches of `rows` sequences. The ranks form `teams` teams of equal size, as
    many as divide the micro-batches evenly. A team takes every `teams`-th micro-batch, and its members split the rows.
    """

    rows: int
    accumulation: int
    teams: int
    members: int
    rank: int

    @classmethod
    def of(cls, config: "TrainConfig", ranks: Ranks) -> "BatchShard":
        """Return the shard of this rank. Raises InputError if the sequences of a step cannot be divided evenly."""
        teams = gcd(config.gradient_accumulation, ranks.world_size)
        members = ranks.world_size // teams
        if config.batch_size % members:
            raise InputError(
                f"the number of processes, one for each GPU, must divide a step evenly, got {ranks.world_size} for "
                f"train.gradient_accumulation {config.gradient_accumulation} micro-batches of train.batch_size "
                f"{config.batch_size} sequences; use one that divides either of the two"
            )
        return cls(config.batch_size, config.gradient_accumulation, teams, members, ranks.rank)

    @property
    def member(self) -> int:
        """The index of this rank in its team."""
        return self.rank % self.members

    @property
    def rows_here(self) -> int:
        """The number of sequences of a micro-batch that this rank takes."""
        return self.rows // self.members

    def micro_batches(self, step: int) -> range:
        """Return the indices of the micro-batches from which this rank takes rows in step 1, 2, ..."""
        first = (step - 1) * self.accumulation
        return range(first + self.rank // self.members, first + self.accumulation, self.teams)


def parallelize(model: nn.Module, config: "TrainConfig", ranks: Ranks, device: torch.device) -> Callable[..., Any]:
    """Wrap a model in DDP if torchrun is used; compile it and checkpoint its activations as configured.

    Parameters keep their names. In DDP, layers are compiled one by one; `_no_split_modules` of the model names
    their classes.
    """
    if config.activation_checkpointing:
        recompute_layers(model)
    if not ranks.joined:
        return torch.compile(model) if config.compile else model
    if config.compile:
        layers = layers_of(model) or [model]
        # A layer's code is compiled once for every structure of the state, which grows with depth in some schemes.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(layers))
        for layer in layers:
            layer.compile()
    devices = [torch.cuda.current_device()] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a model names as its repeated layers, in order."""
    names = getattr(model, "_no_split_modules", None) or ()
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute_layers(model: nn.Module) -> None:
    """Turn on activation checkpointing for the layers of a Hugging Face model, which then keep only their inputs."""
    newest = getattr(model, "activation_checkpointing_enable", None)  # the older name warns if both exist
    (newest or model.gradient_checkpointing_enable)()


def _status(error: Exception) -> int:
    return 2 if isinstance(error, InputError) else error.status if isinstance(error, ReportedElsewhere) else 1


def connection_lost(error: RuntimeError) -> bool:
    """Return whether an error means a lost connection to another rank; Gloo has no exception for it."""
    if isinstance(error, dist.DistError):
        return True
    chain = "".join(traceback.format_exception(error))
    return "gloo" in chain or "Connection closed by peer" in chain or "Connection reset by peer" in chain
