"""Analyse the connections of a trained model: traces, spectra, summaries, and telemetry of training.

watch.py      wrappers that record the connections of a model while it runs
measure.py    measurements at one sublayer, for every scheme
spectrum.py   spectra of products of shortcuts; alignment and effective rank of directions
trace.py      all of it over depth, for one text: `trace` and `Trace`
archive.py    trace files
summary.py    summaries of a trace: `warnings`, `overview`, `summary` and the `sublayer_statistics` behind them
telemetry.py  the gates while a model trains: `gate_quantiles`
"""

from residua.analysis.summary import Table, overview, sublayer_statistics, summary, warnings
from residua.analysis.telemetry import gate_quantiles, has_gates
from residua.analysis.trace import Trace, pieces, trace

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
