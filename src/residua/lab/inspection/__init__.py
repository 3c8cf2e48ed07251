"""Analyse the connections of a trained model: traces, spectra, summaries, and telemetry of training."""

from residua.lab.inspection.summary import Table, overview, sublayer_statistics, summary, warnings
from residua.lab.inspection.telemetry import gate_quantiles, has_gates
from residua.lab.inspection.trace import Trace, pieces, trace

__all__ = [
    "Table",
    "Trace",
    "gate_quantiles",
    "has_gates",
    "overview",
    "pieces",
    "sublayer_statistics",
    "summary",
    "trace",
    "warnings",
]
