"""The numbers published for these tasks in arXiv 2605.06729 and its public repository. None of them was measured here.

The models have descriptive names here. The publication's "DDL" is a Householder shortcut pooled over the sequence,
without the delta write. It is not Deep Delta Learning (arXiv 2601.00417). Its "mHC" splits the width into streams.
Losses are mean squared errors. The publication is inconsistent on whether they are the best or the last of a run.
"""

from typing import Any, NamedTuple

from residua.lab.records.statistics import Estimate

REPOSITORY = "arash-shahmansoori/edelta at 783e727"
README = f"arXiv:2605.06729; README of {REPOSITORY}"
PAPER_SEEDS = 3
RESEARCH = f"arXiv:2605.06729; docs/RESEARCH.md v3.6 of {REPOSITORY}"


def _value(mean: float, deviation: float | None = None) -> Estimate:
    """Return the estimate with a published mean over the seeds, and standard deviation (None if not published)."""
    return Estimate(mean, deviation, PAPER_SEEDS)


class PaperModel(NamedTuple):
    """A published model: a description, the publication's name, the size, and the parameters of the blocks.

    causal: whether the published code is causal; if not, its coefficients come from the mean over the sequence.
    """

    what: str
    name: str
    size: str
    parameters: int
    causal: bool = True

    @property
    def operator(self) -> str:
        return f"{self.what} (“{self.name}”)"

    @property
    def label(self) -> str:
        return f"{self.what} (“{self.name}”, {self.size})"


PAPER_MODELS: dict[str, PaperModel] = {
    "residual": PaperModel("plain residual", "GPT", "9 layers", 1_780_000),
    "pooled-householder-sequence": PaperModel(
        "pooled Householder, sequence", "DDL", "8 layers", 1_784_000, causal=False
    ),
    "mhc-split": PaperModel("mHC, split", "mHC", "9 layers", 1_838_000),
    "jpmhc": PaperModel("JPmHC", "JPmHC", "7 layers, width 512", 1_771_000),
    "edelta-sequence": PaperModel("EDelta, sequence", "EΔ-MHC-Geo", "6 layers", 1_788_000, causal=False),
}
# Mean squared errors in the order of `PAPER_MODELS`: README, three seeds.
LOSSES: dict[str, tuple[Estimate, ...]] = {
    "gyroscope": (
        *(_value(3.78e-3, 0.04e-3), _value(3.36e-3, 0.13e-3), _value(4.02e-3, 0.03e-3)),
        *(_value(3.08e-4, 0.02e-4), _value(1.02e-3, 0.26e-3)),
    ),
    "stability": (
        *(_value(16.4e-6, 0.7e-6), _value(15.3e-6, 1.8e-6), _value(8650e-6, 140e-6)),
        *(_value(8.19e-6, 3.69e-6), _value(4.35e-6, 0.27e-6)),
    ),
    "near-pi": tuple(map(_value, (1.19e-5, 1.11e-5, 9.64e-3, 6.54e-6, 1.44e-6))),
    "near-pi-multi": tuple(map(_value, (3.34e-6, 3.75e-6, 1.63e-3, 1.69e-6, 1.24e-6))),
}
# The norm deviations of models trained on stability: only in RESEARCH, without seeds.
NORM_DEVIATIONS = (0.474, 0.506, 0.543, 0.004, 0.001)

# EDelta on the gyroscope, by the weight of the gate penalty: losses, and gates at the end. RESEARCH, seed 42 according
# to its appendix. 0.1 is the default, also for `LOSSES`.
PENALTY = {0.0: (8.2e-4, "[0.3, 0.7]"), 0.05: (6.1e-4, "[0.1, 0.9]"), 0.1: (5.69e-4, "{0, 1}"), 0.2: (5.8e-4, "{0, 1}")}
PENALTY_DEFAULT = 0.1
GYROSCOPE_EARLIER = 7.08e-4
# EDelta with a penalty of 0.5, by the initial logit of the gate: the loss, and the mean and standard deviation of the
# gates over sublayers at the end. RESEARCH, table 10, without seeds.
STARTS: dict[str, dict[float, tuple[float, Estimate]]] = {
    "near-pi": {
        1.5: (2.10e-6, Estimate(1.0, 0.0, 12)),
        0.0: (2.20e-6, Estimate(0.667, 0.471, 12)),
        -1.5: (2.94e-6, Estimate(0.0, 0.0, 12)),
    },
    "near-pi-multi": {
        1.5: (1.27e-6, Estimate(1.0, 0.0, 12)),
        0.0: (1.62e-6, Estimate(0.750, 0.433, 12)),
        -1.5: (9.80e-7, Estimate(0.083, 0.276, 12)),
    },
}

# With 500 training vectors: the mean cosine with -x, and the reflection strength beta or the gate gamma.
REFLECTION: dict[str, dict[str, Estimate]] = {
    "pooled-householder-sequence": {"cosine": _value(0.96), "beta": _value(1.995, 0.001)},
    "jpmhc": {"cosine": _value(-0.30)},
    "edelta-sequence": {"cosine": _value(0.96), "gamma": _value(0.051, 0.005)},
}
# Mean cosines with -x by the number of training vectors, for "DDL" and "EΔ-MHC-Geo": RESEARCH, table 2, one seed.
COSINES = {
    10: (-0.98, -1.00),
    25: (-0.85, -0.98),
    50: (-0.80, -0.38),
    100: (-0.16, -0.92),
    200: (0.61, -0.35),
    500: (0.96, 0.96),
}


def published(task: str) -> list[dict[str, Any]]:
    """Return the published rows of a task.

    Each has model, label, causal (of the published code; None on the reflection, which has no later inputs), seeds and
    source; and, if published, loss, norm_deviation, cosine, beta, gamma (an `Estimate` each) and parameters.
    """
    facts = {"seeds": PAPER_SEEDS, "source": README}
    if task == "reflection":
        return [
            {"model": name, "label": PAPER_MODELS[name].operator, "causal": None, **values, **facts}
            for name, values in REFLECTION.items()
        ]
    rows: list[dict[str, Any]] = []
    for (name, model), loss, deviation in zip(PAPER_MODELS.items(), LOSSES[task], NORM_DEVIATIONS):
        row = {"model": name, "label": model.label, "causal": model.causal, "parameters": model.parameters}
        measured = {"norm_deviation": _value(deviation)} if task == "stability" else {}
        rows.append({**row, "loss": loss, **measured, **facts})
    return rows
