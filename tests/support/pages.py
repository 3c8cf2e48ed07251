"""What the documentation shows, and the records behind it."""

import json
import re
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page in one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def records(name: str) -> list[dict[str, Any]]:
    """The records of a file in experiments/."""
    return [json.loads(line) for line in (EXPERIMENTS / name).read_text(encoding="utf-8").splitlines()]
