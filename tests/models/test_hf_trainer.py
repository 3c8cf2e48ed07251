"""The models train under the Trainer of transformers, as any causal language model does."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

import residua
from residua.models import ResiduaForCausalLM
from support.converted_models import converted
from support.lanes import some
from support.tiny_models import tiny_config

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")


class Counting(Dataset):
    """Sequences that count upwards: the next token follows from the last, and labels are the inputs themselves."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = 2 + (index + torch.arange(8)) % 40
        return {"input_ids": ids, "labels": ids.clone()}


def arguments(folder, **options):
    """Ten steps, as a `TrainingArguments` or what derives from it."""
    from transformers import TrainingArguments

    kind = options.pop("kind", TrainingArguments)
    given = {"max_steps": 10, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "logging_steps": 1}
    given |= {"save_steps": 5, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0}
    return kind(output_dir=str(folder), **(given | options))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the name of the option changes with the sixth version
@pytest.mark.parametrize(
    ("name", "options"),
    [("ddl-ec", {"gradient_accumulation_steps": 2}), ("ddl-cc", {"gradient_checkpointing": True})],
)
def test_the_trainer_runs_a_few_steps(name, options, tmp_path):
    from transformers import Trainer

    torch.manual_seed(0)
    model = ResiduaForCausalLM(tiny_config(name, embedding_init_std=0.1))
    options = {"max_steps": 30, "lr_scheduler_type": "constant", "logging_steps": 10, "save_steps": 30, **options}
    trainer = Trainer(
        model=model, args=arguments(tmp_path, **options), train_dataset=Counting(), eval_dataset=Counting()
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == sorted(losses, reverse=True)
    # Next tokens are learned, not the identity: that would be shown by a loss on unshifted labels alone.
    assert after < before / 2
    kept = ResiduaForCausalLM.from_pretrained(tmp_path / "checkpoint-30")
    ids = Counting()[0]["input_ids"][None]
    assert kept(ids).logits[0, :-1].argmax(-1).eq(ids[0, 1:]).float().mean() > 0.8
    # Accumulated micro-batches are not counted twice: the logged loss is that of the model.
    assert losses[-1] < before


@pytest.mark.slow
def test_the_trainer_resumes_to_the_last_bit(tmp_path):
    from transformers import Trainer

    def trainer():
        torch.manual_seed(0)
        model = ResiduaForCausalLM(tiny_config("ddl-tc", embedding_init_std=0.1))
        return Trainer(model=model, args=arguments(tmp_path), train_dataset=Counting())

    whole, again = trainer(), trainer()
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())


def ours():
    torch.manual_seed(0)
    return ResiduaForCausalLM(tiny_config("ddl-tc", embedding_init_std=0.1))


def a_converted_one():
    return converted("ddl-tc", torch.float32)


MODELS = pytest.mark.parametrize("build", some([ours, a_converted_one], lambda build: build is ours))


def word_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(48)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", pad_token="w1", unk_token="w1")


def texts(count):
    return [" ".join(f"w{2 + (i + t) % 40}" for t in range(4 + i % 5)) for i in range(count)]


@pytest.mark.nightly
@MODELS
def test_trl_runs_supervised_fine_tuning(build, tmp_path):
    """Texts of several lengths, padded on the right by the collator of trl."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="trl reads datasets")
    trainer = trl.SFTTrainer(
        model=build(),
        args=arguments(tmp_path, kind=trl.SFTConfig, max_length=16, bf16=False, max_steps=20),
        train_dataset=datasets.Dataset.from_dict({"text": texts(64)}),
        processing_class=word_tokenizer(),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] / 1.5


@pytest.mark.nightly
def test_trainers_of_trl_open_a_folder(tmp_path):
    """They choose the class by the architecture, and open the reference model a second time."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="trl reads datasets")
    folder = str(tmp_path / "model")
    a_converted_one().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    lines = texts(8)
    pairs = {"chosen": lines, "rejected": lines[::-1]}
    kinds = {
        trl.SFTTrainer: (trl.SFTConfig, {"text": lines}, {}),
        trl.DPOTrainer: (trl.DPOConfig, {"prompt": lines, **pairs}, {}),
        trl.RewardTrainer: (trl.RewardConfig, pairs, {}),
        trl.GRPOTrainer: (trl.GRPOConfig, {"prompt": lines}, {"reward_funcs": lambda completions, **_: [0.0] * 4}),
    }
    for trainer_class, (kind, data, options) in kinds.items():
        special = {"beta": 0.1, "num_generations": 2, "max_completion_length": 3} if options else {"max_length": 16}
        args = arguments(tmp_path / "out", kind=kind, max_steps=1, bf16=False, per_device_train_batch_size=4, **special)
        trainer = trainer_class(folder, args=args, train_dataset=datasets.Dataset.from_dict(data), **options)
        trainer.train()
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
            assert any(".stream." in name for name in model.state_dict())
        trainer.save_model(tmp_path / kind.__name__)
        opened = residua.load(tmp_path / kind.__name__).state_dict()
        assert all(torch.equal(opened[name], x) for name, x in trainer.model.state_dict().items())


@MODELS
def test_accelerate_prepares_and_trains(build):
    from accelerate import Accelerator

    plain, other = build(), build()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        other, torch.optim.SGD(other.parameters(), lr=0.1), torch.utils.data.DataLoader(Counting(), batch_size=16)
    )
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        plain(**batch).loss.backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), plain.parameters(), strict=True))
