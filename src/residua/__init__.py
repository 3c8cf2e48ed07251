"""Residual connections for PyTorch: Deep Delta Learning and the schemes it is compared with, behind one interface."""

from residua import ops
from residua.connections import (
    PRESETS,
    SCHEMES,
    AttentionResiduals,
    Carry,
    Connection,
    DeepDelta,
    DeltaResidual,
    EDelta,
    EDeltaStream,
    HyperConnections,
    JacobianHyperConnections,
    ManifoldHyperConnections,
    PooledHouseholder,
    Residual,
    Scheme,
    Stream,
    StreamMemory,
    register,
)

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "SCHEMES",
    "AttentionResiduals",
    "Carry",
    "Connection",
    "DeepDelta",
    "DeltaResidual",
    "EDelta",
    "EDeltaStream",
    "HyperConnections",
    "JacobianHyperConnections",
    "ManifoldHyperConnections",
    "PooledHouseholder",
    "Residual",
    "Scheme",
    "Stream",
    "StreamMemory",
    "ops",
    "register",
]
