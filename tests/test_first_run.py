"""A first run prints no warning of deprecation: here each is an error, since the next release may break the call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import run_python
from support.tiny_runs import write_texts

# Run with the names of a folder of texts and of an example. Every command ends with status 0.
COMMANDS = """
import runpy
import sys
from transformers import LlamaConfig, LlamaForCausalLM
from residua.commands.cli import main
from residua.lab.data.tokenizer import byte_tokenizer

def run(line):
    print(line, file=sys.stderr, flush=True)
    assert main(line.split()) == 0

sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=257, head_dim=8, **sizes)).save_pretrained("llama")
byte_tokenizer().save_pretrained("llama")
run(f"prepare --source {sys.argv[1]} --out data --tokenizer byte")
for connection in ("ddl-tc", "residual"):
    run(
        f"train --run {connection} --config tiny --data.path data --model.connection {connection} --train.device cpu "
        "--train.steps 2 --train.warmup_steps 1 --train.batch_size 2 --train.sequence_length 16 "
        "--train.activation_checkpointing true --model.num_hidden_layers 1 --model.hidden_size 16 "
        "--model.num_attention_heads 1 --model.head_dim 16"
    )
run("evaluate ddl-tc")
run("generate ddl-tc --prompt Text --max-new-tokens 3")
run("explore ddl-tc --no-page")
run("explore ddl-tc --out page.html")
run("compare ddl-tc residual --baseline residual")
run("export ddl-tc exported --remote-code")
run("convert llama --connection ddl-tc --start fresh --out converted")
run("generate converted --prompt Text --max-new-tokens 3")
sys.path.insert(0, sys.argv[2])
runpy.run_path(f"{sys.argv[2]}/use.py", run_name="__main__")
"""
EXAMPLE = Path(__file__).parents[1] / "examples" / "custom_scheme"


@pytest.mark.nightly
@pytest.mark.processes
def test_no_command_gives_a_deprecation_warning(tmp_path):
    texts = write_texts(tmp_path / "texts")
    strict = [f"error::{kind}" for kind in ("FutureWarning", "DeprecationWarning")]
    # Of processes that a command starts, too.
    _, said = run_python(COMMANDS, texts, EXAMPLE, cwd=tmp_path, PYTHONWARNINGS=",".join(strict))
    assert "deprecat" not in said.lower()  # transformers warns through its logger too


@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")]
)
def test_idle_threads_sleep_soon_unless_the_user_sets_otherwise(chosen, expected):
    """The setting must be made before PyTorch is loaded."""
    code = "import os, sys, residua.__main__; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, env=environment | chosen, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [expected, "False"]
