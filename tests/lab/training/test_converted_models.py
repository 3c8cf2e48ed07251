"""A converted model trains as the model that it was: Trainer, LoRA, DDP, FSDP2, a compiler."""

import pytest
import torch
from torch.utils.data import Dataset

from support.converted_models import IDS, PLAIN, WINDOWED, converted
from support.lanes import some
from support.processes import together
from support.tolerances import assert_close


class Counting(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        ids = 2 + (index + torch.arange(8)) % 40
        return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.slow
@pytest.mark.parametrize("connection", [WINDOWED, "attnres-block"])
def test_the_trainer_resumes_where_it_stopped(connection, tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    from transformers import Trainer, TrainingArguments

    def trained(folder, *, resume=None):
        model = converted(connection, torch.float32)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, save_steps=2,
            logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=0, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
        trainer.train(resume_from_checkpoint=resume)
        return model.state_dict(), trainer.state.log_history

    whole, history = trained(tmp_path)
    resumed, _ = trained(tmp_path / "again", resume=str(tmp_path / "checkpoint-2"))
    assert history[-2]["loss"] < history[0]["loss"]
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("connection", [PLAIN, WINDOWED])
def test_lora_trains_together_with_the_connections_and_merges(connection):
    peft = pytest.importorskip("peft", reason="LoRA comes with peft")
    model = converted(connection)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["stream"])
    adapted = peft.get_peft_model(model, config)
    adapted(IDS, labels=IDS).loss.backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert any("lora_B" in name for name in trained)
    assert any(".stream." in name for name in trained)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    want = adapted(IDS).logits
    assert_close(adapted.merge_and_unload()(IDS).logits, want)


def gradients(model):
    model(IDS, labels=IDS).loss.backward()
    whole = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        whole[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return whole


def gradients_of_a_rank(rank, kind, connection):
    model = converted(connection).train()
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    result = gradients(model)
    torch.distributed.barrier()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "connection"),
    some([("ddp", PLAIN), ("fsdp2", PLAIN), ("fsdp2", WINDOWED)], lambda case: case != ("fsdp2", PLAIN)),
)
def test_two_processes_compute_the_gradients_of_one(kind, connection, start, tmp_path):
    found, _ = together(start, tmp_path, 2, gradients_of_a_rank, kind, connection)
    want = gradients(converted(connection).train())
    assert found.keys() == want.keys()
    for name, grad in want.items():
        assert_close(found[name], grad)


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("connection", "layers"), some([(PLAIN, 1), (WINDOWED, 1), ("attnres-block", 2)], [(WINDOWED, 1)].__contains__)
)
@pytest.mark.nightly
def test_a_converted_model_compiles_into_one_graph(connection, layers):
    """`fullgraph` raises an error where there would be two."""
    torch._dynamo.reset()
    model = converted(connection, num_hidden_layers=layers).train()
    want = model(IDS, labels=IDS).loss
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(IDS, labels=IDS).loss, want)
