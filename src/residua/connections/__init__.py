"""Residual connections: one interface (`base.py`, the file to read first), one file for each paper's scheme.

Importing this package loads nothing, so that a name can be looked up (`names.py`) before torch is imported.
"""

from typing import TYPE_CHECKING

from residua import lazy
from residua.connections.names import SCHEMES as _CLASSES

if TYPE_CHECKING:
    from residua.connections.altup import AlternatingUpdates
    from residua.connections.attnres import AttentionResiduals
    from residua.connections.attnres_inkling import InklingAttentionResiduals
    from residua.connections.base import Carry, Connection, Readout, Scheme, Stream
    from residua.connections.deep_delta import DeepDelta
    from residua.connections.delta_attnres import DeltaAttentionResiduals
    from residua.connections.delta_residual import DeltaResidual
    from residua.connections.denseformer import DenseFormer
    from residua.connections.edelta import EDelta, EDeltaStream
    from residua.connections.facts import DepthWeights, GateFacts, Mixing, RankOne
    from residua.connections.frac import FracConnections
    from residua.connections.gated_delta import GatedDelta
    from residua.connections.gated_orthogonal import GatedOrthogonal
    from residua.connections.gated_residual import GatedResidual
    from residua.connections.hyper import HyperConnections
    from residua.connections.ihc import IndependentHyperConnections
    from residua.connections.jpmhc import JacobianHyperConnections
    from residua.connections.krom import KroneckerHyperConnections
    from residua.connections.lambdas import Lambdas
    from residua.connections.memory import Memory, StreamMemory, remembered, remembered_tokens
    from residua.connections.mhc import ManifoldHyperConnections
    from residua.connections.mhc_deepseek import DeepSeekHyperConnections
    from residua.connections.mudd import MultiwayDynamicDense
    from residua.connections.norm import RMSNorm
    from residua.connections.options import named
    from residua.connections.pooled_householder import PooledHouseholder
    from residua.connections.projection import Projection, WideProjection
    from residua.connections.registry import PRESETS, SCHEMES, build, describe, register, resolve, schemes
    from residua.connections.residual import Residual
    from residua.connections.siamese import SiameseNorm
    from residua.connections.spec import TensorSpec
    from residua.connections.wide import WideResidual

__all__ = [
    "PRESETS",
    "SCHEMES",
    "AlternatingUpdates",
    "AttentionResiduals",
    "Carry",
    "Connection",
    "DeepDelta",
    "DeepSeekHyperConnections",
    "DeltaAttentionResiduals",
    "DeltaResidual",
    "DenseFormer",
    "DepthWeights",
    "EDelta",
    "EDeltaStream",
    "FracConnections",
    "GateFacts",
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
    "Memory",
    "Mixing",
    "MultiwayDynamicDense",
    "PooledHouseholder",
    "Projection",
    "RMSNorm",
    "RankOne",
    "Readout",
    "Residual",
    "Scheme",
    "SiameseNorm",
    "Stream",
    "StreamMemory",
    "TensorSpec",
    "WideProjection",
    "WideResidual",
    "build",
    "describe",
    "named",
    "register",
    "remembered",
    "remembered_tokens",
    "resolve",
    "schemes",
]

_MODULES = ["registry", "base", "delta_residual", "facts", "memory", "norm", "projection", "spec"]
_MODULES += [place.partition(":")[0] for place in _CLASSES.values()]

__getattr__, __dir__ = lazy.attributes(__name__, __all__, _MODULES)
