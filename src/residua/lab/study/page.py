"""The page of a study: one file that asks for nothing, in which every text is inert."""

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from residua.records.jsonlines import finite

TEMPLATE = Path(__file__).parent / "assets" / "page.html"


def page(payload: Mapping[str, Any]) -> str:
    """The page that shows `payload`, as `report.payload` makes it."""
    data = json.dumps(finite(payload), ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e")
    title, parts = html.escape(str(payload["title"])), TEMPLATE.read_text(encoding="utf-8").split("<!-- split -->")
    return f"{parts[0]}{title}{parts[1]}{data}{parts[2]}"
