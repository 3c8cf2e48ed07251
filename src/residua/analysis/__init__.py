"""What the connections of a trained model do: traces of them, their spectra, summaries, and telemetry of training.

watch.py      stand-ins for the connections of a model while it runs
measure.py    what is measured at one sublayer, for every scheme
spectrum.py   spectra of products of shortcuts; alignment and effective rank of directions
trace.py      all of it over depth, for one text: `trace` and `Trace`
archive.py    the file of a trace
summary.py    a trace for a reader: `warnings`, `overview`, `summary` and the `figures` behind them
telemetry.py  the gates while a model trains: `gate_quantiles`
"""

from residua.analysis.summary import Table, figures, overview, summary, warnings
from residua.analysis.telemetry import gate_quantiles, has_gates
from residua.analysis.trace import Trace, pieces, trace

__all__ = [
    "Table",
    "Trace",
    "figures",
    "gate_quantiles",
    "has_gates",
    "overview",
    "pieces",
    "summary",
    "trace",
    "warnings",
]
