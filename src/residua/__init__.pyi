from residua.connections.base import Carry as Carry
from residua.connections.base import Connection as Connection
from residua.connections.base import Scheme as Scheme
from residua.connections.base import Stream as Stream
from residua.connections.parts.memory import StreamMemory as StreamMemory
from residua.connections.registry import build as build
from residua.connections.registry import register as register
from residua.connections.registry import resolve as resolve
from residua.connections.registry import schemes as schemes
from residua.connections.schemes import *  # noqa: F403  # the listing of that package
from residua.conversion.convert_model import convert as convert
from residua.conversion.convert_model import unconvert as unconvert
from residua.conversion.saving import load as load
from residua.conversion.saving import load_connection as load_connection
from residua.conversion.saving import save_connection as save_connection

from . import connections as connections
from . import ops as ops
from . import testing as testing

__version__: str
