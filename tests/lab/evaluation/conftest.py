"""Run folders with made-up numbers, as training leaves them."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder and return its path; `offset` is added to a common loss curve."""

    def make(
        name: str,
        *,
        connection: object = "residual",
        seed: int = 0,
        offset: float = 0.0,
        steps: int = 100,
        every: int = 10,
        seconds_per_step: float = 0.5,
        lr: float = 1e-3,
        evaluate: bool = True,
        fingerprint: str = "corpus-a",
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        model = {"connection": connection, "hidden_size": 16}
        train = {"seed": seed, "lr": lr, "steps": steps}
        # JSON is YAML.
        (folder / "config.yaml").write_text(json.dumps({"model": model, "data": {"path": None}, "train": train}))
        facts = {"data": {"fingerprint": fingerprint}, "parameters": 1234}
        (folder / "facts.json").write_text(json.dumps(facts))
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(every, steps + 1, every):
                loss = 4 + 3 / step + offset + 0.01 * seed
                row = {"step": step, "tokens": 64 * step, "seconds": seconds_per_step * step}
                print(json.dumps(row | {"loss": loss, "lr": lr, "tokens_per_second": 128.0}), file=file)
                if evaluate:
                    print(json.dumps(row | {"val_loss": loss}), file=file)
        return folder

    return make
