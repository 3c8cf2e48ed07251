"""The numbers that were published for these tasks: arXiv:2605.06729 and its public repository. None of them is ours.

The models go by what they are here. What the publication calls "DDL" is a Householder shortcut pooled over the sequence
and without the delta write, which is not Deep Delta Learning (arXiv:2601.00417); what it calls "mHC" splits the width
into streams. Losses are mean squared errors; whether the best or the last of a run is not stated consistently.
"""

from typing import Any, NamedTuple

REPOSITORY = "arash-shahmansoori/edelta at 783e727"
README = f"arXiv:2605.06729; README of {REPOSITORY}"
RESEARCH = f"arXiv:2605.06729; docs/RESEARCH.md v3.6 of {REPOSITORY}"


class Model(NamedTuple):
    """What it is, what the publication calls it, its size, and its parameters without what surrounds the blocks."""

    what: str
    name: str
    size: str
    parameters: int

    @property
    def label(self) -> str:
        return f"{self.what} (“{self.name}”, {self.size})"


MODELS: dict[str, Model] = {
    "residual": Model("plain residual", "GPT", "9 layers", 1_780_000),
    "pooled-householder-sequence": Model("pooled Householder, sequence", "DDL", "8 layers", 1_784_000),
    "mhc-split": Model("mHC, split", "mHC", "9 layers", 1_838_000),
    "jpmhc": Model("JPmHC", "JPmHC", "7 layers, width 512", 1_771_000),
    "edelta-sequence": Model("EDelta, sequence", "EΔ-MHC-Geo", "6 layers", 1_788_000),
}


def _by_model(*values: Any) -> dict[str, Any]:
    """Return one value for each of `MODELS`, given in their order."""
    return dict(zip(MODELS, values, strict=True))


# Whether the published code's model sees later inputs: its coefficients come from the mean over the whole sequence.
CAUSAL: dict[str, bool] = _by_model(True, False, True, True, False)


class Value(NamedTuple):
    """A mean and its standard deviation over seeds, None where none was published."""

    mean: float
    deviation: float | None = None


# Three seeds. task -> model -> mean squared error.
LOSSES: dict[str, dict[str, Value]] = {
    "gyroscope": _by_model(
        Value(3.78e-3, 0.04e-3),
        Value(3.36e-3, 0.13e-3),
        Value(4.02e-3, 0.03e-3),
        Value(3.08e-4, 0.02e-4),
        Value(1.02e-3, 0.26e-3),
    ),
    "stability": _by_model(
        Value(16.4e-6, 0.7e-6),
        Value(15.3e-6, 1.8e-6),
        Value(8650e-6, 140e-6),
        Value(8.19e-6, 3.69e-6),
        Value(4.35e-6, 0.27e-6),
    ),
    "near-pi": _by_model(*map(Value, (1.19e-5, 1.11e-5, 9.64e-3, 6.54e-6, 1.44e-6))),
    "near-pi-multi": _by_model(*map(Value, (3.34e-6, 3.75e-6, 1.63e-3, 1.69e-6, 1.24e-6))),
}

# Of the models trained on stability (docs/RESEARCH.md).
NORM_DEVIATION: dict[str, float] = _by_model(0.474, 0.506, 0.543, 0.004, 0.001)

# Older and of one seed (docs/RESEARCH.md v3.6). "jpmhc" was another model then: see OLDER_MODELS.
OLDER_LOSSES: dict[str, dict[str, Value]] = {
    "gyroscope": _by_model(*map(Value, (3.80e-3, 3.29e-3, 4.06e-3, 3.46e-3, 7.08e-4))),
    "stability": _by_model(*map(Value, (1.55e-5, 1.41e-5, 8.46e-3, 3.41e-6, 4.53e-6))),
    "near-pi": _by_model(*map(Value, (1.20e-5, 1.16e-5, 9.83e-3, 1.70e-6, 1.16e-6))),
    "near-pi-multi": _by_model(*map(Value, (4.93e-6, 4.85e-6, 1.55e-2, 1.32e-6, 1.51e-6))),
}
OLDER_MODELS: dict[str, Model] = {**MODELS, "jpmhc": Model("JPmHC", "JPmHC", "9 layers, width 128", 1_896_000)}


class Reflection(NamedTuple):
    """Mean cosine with -x, and the reflection strength beta or the gate gamma, whichever the model has."""

    cosine: float
    beta: Value | None = None
    gamma: Value | None = None


# Three seeds, 500 training vectors.
REFLECTION: dict[str, Reflection] = {
    "pooled-householder-sequence": Reflection(0.96, beta=Value(1.995, 0.001)),
    "jpmhc": Reflection(-0.30),
    "edelta-sequence": Reflection(0.96, gamma=Value(0.051, 0.005)),
}

# Older and of one seed: number of training vectors -> model.
OLDER_REFLECTION: dict[int, dict[str, Reflection]] = {
    count: {
        "pooled-householder-sequence": Reflection(cosine, beta=Value(beta)),
        "edelta-sequence": Reflection(edelta_cosine, gamma=Value(gamma)),
    }
    for count, beta, cosine, gamma, edelta_cosine in (
        (10, 1.40, -0.98, 0.235, -1.00),
        (25, 1.58, -0.85, 0.255, -0.98),
        (50, 1.88, -0.80, 0.171, -0.38),
        (100, 1.95, -0.16, 0.192, -0.92),
        (200, 1.98, 0.61, 0.281, -0.35),
        (500, 1.99, 0.96, 0.044, 0.96),
    )
}


def published(task: str) -> list[dict[str, Any]]:
    """Return the published rows of a task, the three-seed numbers first and then the older ones.

    Each has kind "published", task, model, label, causal (of the published code), seeds, source, older (bool), and what
    was published of: loss, norm_deviation, cosine, beta, gamma (each a `Value`), parameters, num_train.
    """
    rows: list[dict[str, Any]] = []
    for losses, models, source, seeds in (
        (LOSSES, MODELS, README, 3),
        (OLDER_LOSSES, OLDER_MODELS, RESEARCH, 1),
    ):
        for model, loss in losses.get(task, {}).items():
            row = _row(task, model, models[model].label, source, seeds)
            row |= {"loss": loss, "parameters": models[model].parameters}
            if task == "stability" and seeds == 3:
                # Published apart from the losses, in RESEARCH alone, and without a word on seeds.
                row["norm_deviation"] = Value(NORM_DEVIATION[model])
            rows.append(row)
    if task == "reflection":
        newest = [(500, REFLECTION, README, 3)]
        older = [(count, models, RESEARCH, 1) for count, models in OLDER_REFLECTION.items()]
        for count, models, source, seeds in newest + older:
            for model, (cosine, beta, gamma) in models.items():
                what, name = MODELS[model][:2]
                row = _row(task, model, f"{what} (“{name}”)", source, seeds) | {"num_train": count}
                # A single position: nothing comes later, and no badge applies.
                rows.append(row | {"causal": None, "cosine": Value(cosine), "beta": beta, "gamma": gamma})
    return rows


def _row(task: str, model: str, label: str, source: str, seeds: int) -> dict[str, Any]:
    return {
        "kind": "published",
        "task": task,
        "model": model,
        "label": label,
        "causal": CAUSAL[model],
        "seeds": seeds,
        "source": source,
        "older": source == RESEARCH,
    }
