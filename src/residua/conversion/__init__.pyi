from residua.conversion.convert_model import convert as convert
from residua.conversion.convert_model import unconvert as unconvert
from residua.conversion.saving import load as load
from residua.conversion.saving import load_connection as load_connection
from residua.conversion.saving import save_connection as save_connection
