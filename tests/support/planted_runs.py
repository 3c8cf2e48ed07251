"""Run folders with made-up numbers, as training leaves them."""

import json
import math
from pathlib import Path


def planted_run(
    folder: Path,
    connection: object = "residual",
    seed: int = 0,
    *,
    offset: float = 0.0,
    steps: int = 100,
    crashed_at: int | None = None,
    not_finite_at: int | None = None,
    every: int = 10,
    seconds_per_step: float = 0.5,
    lr: float = 1e-3,
    evaluate: bool = True,
    fingerprint: str = "corpus-a",
    **train: object,
) -> Path:
    """Write a run folder and return it; `offset` is added to a loss curve that all share, and `seed` moves it."""
    folder.mkdir()
    model = {"connection": connection, "hidden_size": 16}
    train = {"seed": seed, "lr": lr, "steps": steps, **train}
    # JSON is YAML.
    (folder / "config.yaml").write_text(json.dumps({"model": model, "data": {"path": None}, "train": train}))
    (folder / "facts.json").write_text(json.dumps({"data": {"fingerprint": fingerprint}, "parameters": 1234}))
    rows = []
    for step in range(every, (crashed_at or steps) + 1, every):
        loss = math.nan if step == not_finite_at else 4 + 3 / step + offset + 0.01 * seed
        row = {"step": step, "tokens": 64 * step, "seconds": seconds_per_step * step}
        speed = 64 / seconds_per_step / (1 + (step == every))  # the first logged step is slow
        rows.append(row | {"loss": loss, "lr": lr, "tokens_per_second": speed})
        if evaluate:
            rows.append(row | {"val_loss": loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
