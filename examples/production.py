"""From a pretrained model to a folder that vLLM serves: convert it, train only the connections, compare, save.

    python examples/production.py models/smollm2 my-text.txt smollm2-ihc
    python examples/production.py    # a tiny model with random weights, on this file, in a new folder: within a minute

Needs the laboratory, `pip install ".[lab]"`, and accelerate for the Trainer.
"""

import math
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

import residua
from residua.commands.cli import main as residua_command

SCHEME = "ihc"  # starts with the outputs of the plain model, and vLLM serves it
RATE = 2e-3  # of the connections, which alone are trained
STEPS, BATCH, LENGTH = 30, 2, 128
logging.disable_progress_bar()


def main(base: Path, text: Path, out: Path) -> None:
    residua_command(["convert", str(base), "--connection", SCHEME, "--out", str(out)])  # weights, tokenizer and a card
    model, tokenizer = residua.load(out), AutoTokenizer.from_pretrained(out)

    tokens = torch.tensor(tokenizer(text.read_text(encoding="utf-8"))["input_ids"])
    rows = [{"input_ids": row, "labels": row} for row in tokens.split(LENGTH) if len(row) == LENGTH]
    held_out, train = rows[: len(rows) // 10 + 1], rows[len(rows) // 10 + 1 :]
    plain = loss_of(AutoModelForCausalLM.from_pretrained(base), held_out)
    print(f"held-out loss: plain {plain:.4f}, converted {loss_of(model, held_out):.4f}")

    model.requires_grad_(False)
    connections = [parameter for name, parameter in model.named_parameters() if ".stream." in name]
    for parameter in connections:
        parameter.requires_grad_(True)
    print(f"training {sum(map(torch.numel, connections)):,} of {model.num_parameters():,} parameters")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, learning_rate=RATE, max_steps=STEPS, per_device_train_batch_size=BATCH, save_strategy="no",
            logging_steps=10, report_to="none", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=train).train()
    print(f"held-out loss: plain {plain:.4f}, trained {loss_of(model, held_out):.4f}")

    model.save_pretrained(out)
    card = ModelCard.load(out / "README.md")  # it names the base already
    card.data.datasets = [text.stem]
    card.save(out / "README.md")
    print(f"serve it with: vllm serve {out}")


@torch.no_grad()
def loss_of(model: torch.nn.Module, rows: list[dict[str, torch.Tensor]]) -> float:
    model.eval()
    losses = [model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss for row in rows]
    return math.fsum(map(float, losses)) / len(losses)


def tiny_base(folder: Path) -> Path:
    """Write a Llama with random weights and a tokenizer of bytes."""
    from residua.lab.data.tokenizer import byte_tokenizer

    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(*map(Path, sys.argv[1:]))
    else:
        folder = Path(tempfile.mkdtemp())
        main(tiny_base(folder / "base"), Path(__file__), folder / "converted")
