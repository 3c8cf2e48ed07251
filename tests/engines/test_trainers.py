"""Trainers of others on two processes train converted models as on one. Fabric needs `pip install lightning-fabric`.

`python tools/engine_tests.py trainers` makes the record.
"""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from support import processes
from support.converted_models import VOCAB, converted

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(1800)]
together = partial(processes.together, seconds=1500)
SCHEMES = ("residual", "hc", "ddl-tc")
STEPS, ROWS = 5, 8
TOKENS = torch.randint(2, VOCAB, (STEPS * ROWS, 9), generator=torch.Generator().manual_seed(5))


class Rows(Dataset):
    """Sequences of random tokens, which are their labels too."""

    def __len__(self):
        return len(TOKENS)

    def __getitem__(self, index):
        return {"input_ids": TOKENS[index], "labels": TOKENS[index]}


def loop(model, optimizer, batches, backward=torch.Tensor.backward):
    """Train on the batches of this rank. Return the losses, as means over the ranks."""
    losses = []
    for batch in batches:
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    torch.distributed.all_reduce(losses)
    return (losses / torch.distributed.get_world_size()).tolist()


def own_rows(rank):
    """Batches of all rows in order, of which each rank has its part."""
    size = torch.distributed.get_world_size()
    for batch in DataLoader(Rows(), ROWS):
        yield {name: x.chunk(size)[rank] for name, x in batch.items()}


def with_fsdp2(rank, model, folder):
    """One unit for each layer, and one for the rest."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, torch.optim.AdamW(model.parameters(), 1e-3), own_rows(rank))


def with_accelerate(rank, model, folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Rows(), ROWS // torch.distributed.get_world_size())
    parts = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), loader)
    return loop(*parts, accelerator.backward)


def with_fabric(rank, model, folder):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy

    size = torch.distributed.get_world_size()
    strategy = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3))
    return loop(model, optimizer, own_rows(rank), fabric.backward)


def with_trainer(rank, model, folder, kind=("transformers", "Trainer", "TrainingArguments"), **options):
    """The losses that it logs at every step."""
    from importlib import import_module

    module, trainer, arguments = kind
    package = import_module(module)
    settings = {"per_device_train_batch_size": ROWS // torch.distributed.get_world_size(), "max_steps": STEPS}
    settings |= {"learning_rate": 1e-3, "logging_steps": 1, "use_cpu": True, "seed": 0, "disable_tqdm": True}
    args = getattr(package, arguments)(str(folder), report_to=[], save_strategy="no", bf16=False, **settings)
    options.setdefault("train_dataset", Rows())
    trainer = getattr(package, trainer)(model=model, args=args, **options)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def with_trl(rank, model, folder):
    from datasets import Dataset as Table

    from residua.lab.data.tokenizer import byte_tokenizer

    kind = ("trl", "SFTTrainer", "SFTConfig")
    table = Table.from_dict({"input_ids": TOKENS.tolist()})
    return with_trainer(rank, model, folder, kind, train_dataset=table, processing_class=byte_tokenizer())


ENGINES = {
    "Trainer": (with_trainer, "transformers"),
    "accelerate": (with_accelerate, "accelerate"),
    "FSDP2": (with_fsdp2, "torch"),
    "Fabric": (with_fabric, "lightning_fabric"),
    "TRL": (with_trl, "trl"),
}


def curves(rank, engine, folder):
    """On each rank: the losses of every scheme."""
    train, _ = ENGINES[engine]
    return {name: train(rank, converted(name, torch.float32).train(), folder / name) for name in SCHEMES}


@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_train_as_one(start, tmp_path, engine):
    """Five steps of AdamW on the same rows."""
    _, package = ENGINES[engine]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found = []
    for size in (1, 2):
        (meet := tmp_path / str(size)).mkdir()
        found.append(together(start, meet, size, curves, engine, tmp_path / "out")[0])
    alone, two = found
    for name in SCHEMES:
        assert len(alone[name]) == STEPS
        assert alone[name][-1] != alone[name][0]
        assert two[name] == pytest.approx(alone[name], rel=5e-6), name
