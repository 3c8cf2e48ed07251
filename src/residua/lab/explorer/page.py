"""Assemble the page: markup, style, modules and data in ONE file that makes no request and needs no server.

The browser gets the modules as one script, small data as JSON, and large data (arrays, the plotting library) gzipped
and in base64, unpacked by the views that need it. This module does not depend on what the views show.
"""

import base64
import gzip
import html
import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.errors import extra
from residua.records.durable import write_text

if TYPE_CHECKING:
    import numpy

ASSETS = Path(__file__).parent / "assets"
RESULTS = Path(__file__).parent / "results.json"
ENTRY = "main.js"
STYLES = ("style.css", "learn.css", "panels.css")

# Stored types of arrays: a browser's typed arrays of numbers have no wider integers.
STORED = {"bool": "uint8", "int64": "int32", "uint32": "int32", "uint64": "int32"}

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.-]+\.js)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function\*?|const|class) (\w+)", re.MULTILINE)


def write_page(out: str | Path, payload: Mapping[str, Any], arrays: Mapping[str, "numpy.ndarray"]) -> Path:
    """Write the page to the file `out` and return its path.

    payload: what JSON can hold, with "title", "traces" (a list) and "comparison" (an object or None); the page has the
    views Inspect and Compare where there is something to see. arrays: what `arrays(key)` gives in the browser, as a
    typed array with its `shape`: floats as they are (float16 widened to 32 bits), integers and booleans as integers of
    at most 32 bits. Raises ModuleNotFoundError where curves have to be drawn and plotly is missing.
    """
    path = Path(out)
    plots = bool(payload.get("traces") or payload.get("comparison"))
    data = [
        _json("payload", payload),
        _json("results", json.loads(RESULTS.read_text(encoding="utf-8"))),
        *(_array(key, array) for key, array in arrays.items()),
        *([_packed('id="plotly"', _plotly())] if plots else []),
    ]
    parts = {
        "title": html.escape(str(payload.get("title") or "residua")),
        "style": "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES),
        "data": "\n".join(data),
        "script": bundle(ASSETS, ENTRY),
    }
    template = (ASSETS / "index.html").read_text(encoding="utf-8")
    # One pass, so that inserted text is never searched for placeholders.
    page = re.sub(r"<!-- (title|style|data|script) -->", lambda match: parts[match[1]], template)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.resolve(), page)  # the name is the user's: a link is followed
    return path


def bundle(folder: Path, entry: str) -> str:
    """Return the modules that `entry` needs as one script, each in its own function, after the modules it imports.

    A module may contain `import {a, b as c} from "./file.js";` and `export function|const|class name` at the start of a
    line, and no other module syntax.
    """
    return "\n".join(_modules(folder, entry, set()))


def _modules(folder: Path, name: str, bundled: set[str]) -> Iterator[str]:
    """Yield the functions of the module `name` and of the modules it needs that are not `bundled` yet."""
    if name in bundled:
        return
    bundled.add(name)
    code = (folder / name).read_text(encoding="utf-8")
    for _, source in _IMPORT.findall(code):
        yield from _modules(folder, source, bundled)
    exports = [exported for _, exported in _EXPORT.findall(code)]
    code = _IMPORT.sub(lambda match: f"const {{{_renamed(match[1])}}} = {_scope(match[2])};", code)
    code = _EXPORT.sub(r"\1 \2", code)
    # Inside a script element these would end it, or hide its end.
    code = code.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    yield f"const {_scope(name)} = (() => {{\n{code}\nreturn {{{', '.join(exports)}}};\n}})();"


def _renamed(names: str) -> str:
    return re.sub(r"\s+as\s+", ": ", names)


def _scope(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _json(name: str, value: Any) -> str:
    """Return a JSON element in which no text can begin a tag or an entity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _array(key: str, array: "numpy.ndarray") -> str:
    name = STORED.get(array.dtype.name, array.dtype.name)
    stored = array.astype(name)
    shape = ",".join(map(str, array.shape))
    attributes = f'data-array="{html.escape(key)}" data-type="{name}" data-shape="{shape}"'
    return _packed(attributes, stored.astype(stored.dtype.newbyteorder("<")).tobytes())


def _packed(attributes: str, data: bytes) -> str:
    text = base64.b64encode(gzip.compress(data, mtime=0)).decode("ascii")
    return f'<script type="text/plain" {attributes}>{text}</script>'


def _plotly() -> bytes:
    with extra("lab"):
        folder = resources.files("plotly")
    return (folder / "package_data" / "plotly.min.js").read_bytes()
