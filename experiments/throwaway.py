"""What experiments that compare many training runs share: one run in a folder that is thrown away, and their data."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def throwaway_run(recipe: str, overrides: list[str], report: Callable[[int], None]) -> dict[str, Any]:
    """The part of a record that tells what a run gave: tokens, val_loss, seconds and facts. No TensorBoard events."""
    from residua.lab.experiment import run
    from residua.lab.training import load_config

    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        result = run(load_config(recipe, [*overrides, "--train.tensorboard=false"]), folder, progress=report)
        if result["interrupted"]:
            raise KeyboardInterrupt
        return {
            "tokens": result["tokens"],
            "val_loss": result["val_loss"],
            "seconds": round(result["seconds"], 1),
            "facts": json.loads((folder / "facts.json").read_text()),
        }


@contextmanager
def embedded_corpus() -> Iterator[str]:
    """The folder of the documentation inside this Python, prepared with 2048 vocabulary entries."""
    from residua.lab.data import prepare

    with tempfile.TemporaryDirectory() as folder:
        yield str(prepare("stdlib", Path(folder) / "data", vocab_size=2048, progress=False).folder)
