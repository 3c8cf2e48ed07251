"""Residual connections for PyTorch: Deep Delta Learning and the schemes it is compared with, behind one interface.

Importing this package loads nothing; torch is imported with the first name that is asked of it. Where transformers was
imported before, its Auto classes open our models and converted ones from then on.
"""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from residua import lazy

if TYPE_CHECKING:
    from residua import connections, ops, testing
    from residua.connections import (
        AlternatingUpdates,
        AttentionResiduals,
        Carry,
        Connection,
        DeepDelta,
        DeepSeekHyperConnections,
        DeltaAttentionResiduals,
        DeltaResidual,
        DenseFormer,
        EDelta,
        EDeltaStream,
        FracConnections,
        GatedDelta,
        GatedOrthogonal,
        GatedResidual,
        HyperConnections,
        IndependentHyperConnections,
        InklingAttentionResiduals,
        JacobianHyperConnections,
        KroneckerHyperConnections,
        Lambdas,
        ManifoldHyperConnections,
        MultiwayDynamicDense,
        PooledHouseholder,
        Residual,
        Scheme,
        SiameseNorm,
        Stream,
        StreamMemory,
        WideResidual,
        build,
        register,
        resolve,
        schemes,
    )
    from residua.conversion import convert, load, load_connection, save_connection, unconvert

__version__ = "0.1.0"

__all__ = [
    "AlternatingUpdates",
    "AttentionResiduals",
    "Carry",
    "Connection",
    "DeepDelta",
    "DeepSeekHyperConnections",
    "DeltaAttentionResiduals",
    "DeltaResidual",
    "DenseFormer",
    "EDelta",
    "EDeltaStream",
    "FracConnections",
    "GatedDelta",
    "GatedOrthogonal",
    "GatedResidual",
    "HyperConnections",
    "IndependentHyperConnections",
    "InklingAttentionResiduals",
    "JacobianHyperConnections",
    "KroneckerHyperConnections",
    "Lambdas",
    "ManifoldHyperConnections",
    "MultiwayDynamicDense",
    "PooledHouseholder",
    "Residual",
    "Scheme",
    "SiameseNorm",
    "Stream",
    "StreamMemory",
    "WideResidual",
    "build",
    "connections",
    "convert",
    "load",
    "load_connection",
    "ops",
    "register",
    "resolve",
    "save_connection",
    "schemes",
    "testing",
    "unconvert",
]

__getattr__, __dir__ = lazy.attributes(__name__, __all__, ["connections", "conversion", "models", "ops", "testing"])

if "transformers" in sys.modules:
    with suppress(ImportError):  # the connections need neither the lab nor a transformers that it takes
        import residua.conversion.configuration  # noqa: F401
