"""One file for each paper. `residua` and `residua.connections` export every class listed here."""

from residua.connections.schemes.altup import AlternatingUpdates as AlternatingUpdates
from residua.connections.schemes.attnres import AttentionResiduals as AttentionResiduals
from residua.connections.schemes.attnres_inkling import InklingAttentionResiduals as InklingAttentionResiduals
from residua.connections.schemes.deep_delta import DeepDelta as DeepDelta
from residua.connections.schemes.delta_attnres import DeltaAttentionResiduals as DeltaAttentionResiduals
from residua.connections.schemes.delta_residual import DeltaResidual as DeltaResidual
from residua.connections.schemes.denseformer import DenseFormer as DenseFormer
from residua.connections.schemes.edelta import EDelta as EDelta
from residua.connections.schemes.edelta import EDeltaStream as EDeltaStream
from residua.connections.schemes.frac import FracConnections as FracConnections
from residua.connections.schemes.gated_delta import GatedDelta as GatedDelta
from residua.connections.schemes.gated_orthogonal import GatedOrthogonal as GatedOrthogonal
from residua.connections.schemes.gated_residual import GatedResidual as GatedResidual
from residua.connections.schemes.hyper import HyperConnections as HyperConnections
from residua.connections.schemes.ihc import IndependentHyperConnections as IndependentHyperConnections
from residua.connections.schemes.jpmhc import JacobianHyperConnections as JacobianHyperConnections
from residua.connections.schemes.krom import KroneckerHyperConnections as KroneckerHyperConnections
from residua.connections.schemes.lambdas import Lambdas as Lambdas
from residua.connections.schemes.mhc import ManifoldHyperConnections as ManifoldHyperConnections
from residua.connections.schemes.mhc_deepseek import DeepSeekHyperConnections as DeepSeekHyperConnections
from residua.connections.schemes.mudd import MultiwayDynamicDense as MultiwayDynamicDense
from residua.connections.schemes.pooled_householder import PooledHouseholder as PooledHouseholder
from residua.connections.schemes.residual import Residual as Residual
from residua.connections.schemes.siamese import SiameseNorm as SiameseNorm
from residua.connections.schemes.wide import WideResidual as WideResidual
