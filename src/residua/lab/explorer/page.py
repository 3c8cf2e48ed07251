"""Assemble the page: markup, style, modules and data in one file that makes no requests and needs no server.

Modules are embedded as `data:` URLs in an import map, small data as JSON, and large data (arrays, the plotting library)
gzipped and in base64, to be unpacked by the views that need it. This module does not depend on the content of the
views.
"""

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from residua.errors import extra
from residua.files.durable import write_text
from residua.lab.records.terminal import printable

if TYPE_CHECKING:
    import numpy

PAGE = "explorer.html"
ASSETS = Path(__file__).parent / "assets"
BROWSER_RESULTS = Path(__file__).parent / "results.json"
STYLE_SHEETS = ("style.css", "learn.css", "panels.css")

# Characters that are not escaped in the `data:` URL of a module, in addition to letters and digits.
LITERAL = " !$'()*+,-./:;=?@[]^_`{|}~"
# The stored types of arrays: a browser's typed arrays of numbers have no wider integers.
STORED = {"bool": "uint8", "int64": "int32", "uint32": "int32", "uint64": "int32"}


def write_page(out: str | Path, payload: Mapping[str, Any], arrays: Mapping[str, "numpy.ndarray"]) -> Path:
    """Write the page to the file `out` and return its path.

    payload: values for JSON, with "title", "traces" (a list) and "comparison" (an object or None). The page shows the
    views Inspect and Compare only if there are traces or a comparison. "home", if given, is the link of the title.
    arrays: in the browser, `arrays(key)` returns a typed array with a `shape`: floats unchanged (float16 widened to 32
    bits), integers and booleans as integers of at most 32 bits.

    Raises ModuleNotFoundError if curves have to be drawn and plotly is missing.
    """
    path = Path(out)
    plots = bool(payload.get("traces") or payload.get("comparison"))
    data = [
        _json('type="importmap"', {"imports": modules(ASSETS)}),
        _json('type="application/json" id="payload"', payload),
        _json('type="application/json" id="results"', json.loads(BROWSER_RESULTS.read_text(encoding="utf-8"))),
        *(_array(key, array) for key, array in arrays.items()),
        *([_packed('id="plotly"', _plotly())] if plots else []),
    ]
    parts = {
        "title": html.escape(printable(payload.get("title") or "residua")),
        "style": "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLE_SHEETS),
        "data": "\n".join(data),
    }
    template = (ASSETS / "index.html").read_text(encoding="utf-8")
    # In one pass, so that inserted text is never searched for placeholders.
    page = re.sub(r"<!-- (title|style|data) -->", lambda match: parts[match[1]], template)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.resolve(), page)  # the user named this file, so a link is followed
    return path


def modules(folder: Path) -> dict[str, str]:
    """Return the JavaScript modules of a folder as `data:` URLs, by the names under which they import each other.

    Modules import `from "./file.js"`. A `data:` URL can only import bare names, so the page uses "file.js".
    """
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.js"))}
    bare = {name: source.replace('from "./', 'from "') for name, source in sources.items()}
    return {name: f"data:text/javascript;charset=utf-8,{quote(source, LITERAL)}" for name, source in bare.items()}


def _json(attributes: str, value: Any) -> str:
    """Return a script element with a value as JSON, escaped so that no text can begin a tag or an entity.

    Lone surrogates, which have no UTF-8, are escaped too.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
    return f"<script {attributes}>{text}</script>"


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
