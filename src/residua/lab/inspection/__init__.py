"""Analyse the connections of a trained model: traces, spectra, summaries, and telemetry during training."""

from residua.lab.inspection.boundaries import Lens, boundaries, logit_lens
from residua.lab.inspection.summary import overview, sublayer_statistics, summary, warnings
from residua.lab.inspection.telemetry import gate_quantiles, has_gates
from residua.lab.inspection.trace import Trace, pieces, trace

__all__ = [
    "Lens",
    "Trace",
    "boundaries",
    "gate_quantiles",
    "has_gates",
    "logit_lens",
    "overview",
    "pieces",
    "sublayer_statistics",
    "summary",
    "trace",
    "warnings",
]
