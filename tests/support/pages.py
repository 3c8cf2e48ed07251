"""What the documentation shows."""

import re


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page in one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
